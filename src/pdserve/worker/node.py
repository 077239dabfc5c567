"""The inside of a worker process without its I/O edges: engine loop, transfer owner, role and links as one unit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

import trio

from pdserve.config import DecodeConfig, PrefillConfig, parse_faults
from pdserve.engine.radix import KvCache
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.slots import SlotPool
from pdserve.errors import FatalError
from pdserve.ids import new_incarnation
from pdserve.telemetry.metrics import WorkerMetrics
from pdserve.transfer.owner import TransferOwner
from pdserve.wire.handshake import DECODE_ADMISSION, PROTOCOL_MAX, PROTOCOL_MIN
from pdserve.wire.messages import Hello
from pdserve.worker.decode import DecodeNode
from pdserve.worker.engine_loop import EngineLoop
from pdserve.worker.link import MasterLink
from pdserve.worker.masters import Masters
from pdserve.worker.prefill import PrefillNode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine.base import Engine
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.transfer.agent import TransferAgent
    from pdserve.wire.messages import Role
    from pdserve.worker.dial import Dial
    from pdserve.worker.masters import Source
    from pdserve.worker.thread import OwnerThread

log = logging.getLogger("pdserve.worker")

_LINGER = 0.2
"""Seconds after the last request of a drain: the answer to the pull that ended it may still be on its way to Decode."""


class WorkerNode:
    """One Prefill or Decode node over a loaded engine. `run` is its whole life."""

    def __init__(
        self,
        config: PrefillConfig | DecodeConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        make_agent: Callable[[str], TransferAgent],
        thread: OwnerThread | None,
    ) -> None:
        """`make_agent` gets the agent's name, unique to this life. `thread`: where the engine and the agent may block;
        None: everything runs inline (simulated engine, in-memory agent, virtual time).
        """
        faults = parse_faults(config.faults)
        self.config = config
        self.role_name: Role = "prefill" if isinstance(config, PrefillConfig) else "decode"
        self.node_id, self.incarnation = config.node_name(self.role_name), new_incarnation()
        self.metrics = WorkerMetrics(self._refresh)
        self.cache = KvCache(engine.num_pages, engine.layout.page_size)
        self.slots = SlotPool(config.max_running_requests)
        self.scheduler = Scheduler(
            self.cache,
            self.slots,
            eos=engine.eos_token_ids,
            chunk_tokens=config.chunk_tokens,
            max_seq_len=engine.card.max_len,
            pinned_share=config.hold_share if isinstance(config, PrefillConfig) else 1.0,
        )
        self.loop = EngineLoop(
            engine,
            self.scheduler,
            thread=thread if engine.threaded else None,
            step_timeout=config.step_timeout,
            on_step=self.metrics.step,
            hang_after=faults.step_hang_after,
        )
        failing = iter(range(faults.transfer_fail)) if faults.transfer_fail >= 0 else iter(int, 1)
        self.owner = TransferOwner(
            make_agent(f"{self.node_id}-{self.incarnation}"),
            engine.memory,
            token=config.cluster_token,
            threaded=thread is not None,
            call_timeout=config.step_timeout,
            confirm_timeout=config.confirm_timeout,
            transfer_timeout=config.transfer_timeout,
            cache=self.cache,
            delay=faults.transfer_delay,
            fail=lambda: next(failing, None) is not None,
        )
        self.role: PrefillNode | DecodeNode
        if isinstance(config, PrefillConfig):
            self.role = PrefillNode(
                config, self.loop, self.cache, self.owner, self.metrics, omit_first_token=faults.omit_first_token
            )
        else:
            self.role = DecodeNode(
                config,
                self.loop,
                self.cache,
                self.slots,
                self.owner,
                tokenizer,
                self.metrics,
                fail_choice=faults.fail_choice,
            )
        self.role.on_change = self._report
        self.masters = Masters(interval=config.resolve_interval)
        self._newer_protocol = faults.protocol_bump
        self._changed = trio.Event()
        """The load has changed; for `drain`, which waits for the last request."""
        self._leave = trio.Event()

    async def run(
        self,
        sources: Sequence[Source],
        *,
        status_url: str = "",
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve the Masters until `drain` has let everything finish. Started: links dial, names are looked up.

        Raises FatalError (alone or in a group) when the engine or the transfer owner fails, and when too many pages are
        lost to transfers that do not end; then what runs has its time to finish first.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self.owner.run, name="transfer owner")
            nursery.start_soon(self.loop.run, name="engine loop")
            nursery.start_soon(self._watch_transfers, name="quarantine watch")
            hello = self._hello(status_url)

            def link_to(url: str, dial: Dial) -> MasterLink:
                return MasterLink(
                    url,
                    dial,
                    hello,
                    self.role,
                    self.owner,
                    self.masters.claims,
                    token=self.config.cluster_token,
                    heartbeat_interval=self.config.heartbeat_interval,
                    stand_by=self.config.resolve_interval,
                )

            async with trio.open_nursery() as links:
                await links.start(self.masters.run, sources, link_to, name="masters")
                task_status.started()
                await self._leave.wait()
                links.cancel_scope.cancel()
            nursery.cancel_scope.cancel()

    @property
    def links(self) -> Sequence[MasterLink]:
        """The links there are now; to be walked through without an await."""
        return self.masters.links

    async def drain(self) -> None:
        """Take nothing new, tell the Masters, give what runs `--drain-timeout` seconds, then end `run`."""
        await self._finish()
        self._leave.set()

    async def _finish(self) -> None:
        self.role.draining = True
        for link in self.links:
            link.announce_drain()
        with trio.move_on_after(self.config.drain_timeout):
            while not self.role.idle:
                await self._changed.wait()
        await trio.sleep(_LINGER)

    async def _watch_transfers(self) -> NoReturn:
        """A node whose transfers do not end loses its pages to them: it drains, and its process is replaced."""
        reason = await self.owner.wait_unfit()
        log.error("draining, to be started again: %s", reason)
        await self._finish()
        raise FatalError(reason)

    def check_integrity(self, *, quiet: bool = False) -> None:
        """Raises AssertionError when a pool's counts disagree; with `quiet` also when anything is still in use (I1)."""
        self.scheduler.check_integrity()
        if isinstance(self.role, DecodeNode):
            self.role.pool.check_integrity()
        if quiet:
            stats, counts, transfers = self.role.stats(), self.cache.counts(), self.owner.stats()
            assert (stats.active, stats.queued) == (0, 0), f"{self.node_id}: {stats}"
            assert (counts.pinned, counts.quarantined, self.slots.used) == (0, 0, 0), f"{self.node_id}: {counts}"
            assert (transfers.running, transfers.holds) == (0, 0), f"{self.node_id}: {transfers}"

    def _hello(self, status_url: str) -> Hello:
        engine = self.loop.engine
        admits = isinstance(self.config, DecodeConfig) and not self.config.disable_admission
        return Hello(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX + self._newer_protocol,
            role=self.role_name,
            node_id=self.node_id,
            incarnation=self.incarnation,
            model=engine.card,
            layout=engine.layout,
            transfer=self.owner.metadata,
            capacity=self.config.max_running_requests,
            capabilities=(DECODE_ADMISSION,) if admits else (),
            status_url=status_url,
            heartbeat_interval=self.config.heartbeat_interval,
        )

    def _report(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        for link in self.links:
            link.report()

    def _refresh(self) -> None:
        self.metrics.set_stats(self.role.stats())
        self.metrics.set_slots(used=self.slots.used, queued=self.scheduler.waiting)
        self.metrics.set_holds(self.owner.stats().holds)
