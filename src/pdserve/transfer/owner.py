"""The process-level owner of KV transfers: the one caller of the agent, for all requests of all Master links.

Its task makes rounds. Each collects what there is to do (admit and remove peers, post reads, send notes, poll what
is running, drain notifications), lets `Calls` do it in one batch, and applies the results. Decisions are synchronous.
A failed or hung call ends `run` with FatalError: the process exits, which is the certain end of every transfer.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol, runtime_checkable

import attrs
import msgspec
import trio

from pdserve.errors import FatalError, PeerDisconnectedError, TransferError
from pdserve.nurseries.poller import Poller
from pdserve.transfer.agent import KvHandle
from pdserve.transfer.calls import Call, InlineCalls, ThreadCalls, ignore
from pdserve.transfer.confirm import Confirmations
from pdserve.transfer.holds import HoldTable
from pdserve.transfer.peers import Add, PeerTable
from pdserve.transfer.pull import Stage, encode_note
from pdserve.transfer.reads import Reads
from pdserve.wire.metadata import authentic, sign

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.transfer.agent import TransferAgent
    from pdserve.transfer.confirm import Letter
    from pdserve.transfer.holds import Hold
    from pdserve.transfer.pull import Pull
    from pdserve.transfer.reads import Destination
    from pdserve.wire.messages import TransferMetadata

logger = logging.getLogger(__name__)

_PATIENCE = 0.05
"""Seconds. Bounds how late a round is for what only time makes due (probes, letters, limits)."""
_MAX_PAGE = 1 << 40
_MAX_ADDRESS = 1 << 62


class Memory(Protocol):
    """What the owner needs of the engine's `KvMemory`."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def device(self) -> str: ...


@runtime_checkable
class WakingAgent(Protocol):
    """An agent that calls `on_note` when a notification has arrived."""

    on_note: Callable[[], None] | None


@attrs.frozen
class TransferStatistics:
    running: int
    """Reads that are not terminal, abandoned ones included."""
    quarantined: int
    """Pages in quarantine."""
    peers: int
    """Peers admitted to the agent."""
    holds: int


class TransferOwner:
    """See the module. Every method but `run` and `wait_unfit` is synchronous; all are called from the trio thread."""

    metadata: TransferMetadata
    """Signed, for `Hello`. Set once `run` has started."""

    def __init__(
        self,
        agent: TransferAgent,
        memory: Memory,
        *,
        token: str = "",
        threaded: bool,
        call_timeout: float = 60.0,
        confirm_timeout: float = 5.0,
        transfer_timeout: float = 30.0,
        cache: Destination,
        delay: float = 0.0,
        fail: Callable[[], bool] = lambda: False,
    ) -> None:
        """Times are seconds.

        Seams for tests: each read is posted `delay` seconds late and counts as running meanwhile; it fails if `fail()`.
        """
        self._agent = agent
        self._memory = memory
        self._total_pages = memory.nbytes // memory.page_bytes
        self._token = token
        self._calls: InlineCalls | ThreadCalls = ThreadCalls(call_timeout) if threaded else InlineCalls()
        # Idle rounds are rare: whatever there is to do kicks the poller. An agent that tells when a note arrives (in
        # virtual time, where each round costs real time) is polled fast for its reads only.
        self._wakes = isinstance(agent, WakingAgent)
        self._poller = Poller(poll=self._round, busy=self._busy, slow=0.2)
        if isinstance(agent, WakingAgent):
            agent.on_note = self._kick
        self._peers = PeerTable()
        self._holds = HoldTable(trio.current_time)
        self._new_hold = trio.Event()
        self._confirmations = Confirmations(self._holds, self._peers, confirm_timeout)
        self._reads = Reads(
            agent,
            self._peers,
            self._confirmations,
            cache,
            {Stage.QUEUED: confirm_timeout, Stage.READING: transfer_timeout, Stage.CONFIRMING: confirm_timeout},
            delay=delay,
            fail=fail,
            on_disconnect=self._disconnected,
            on_progress=self._moved,
        )
        self._progress = False
        self._closed = False
        self.unfit = ""
        """Why the process has to be replaced soon: too much is in quarantine."""
        self._became_unfit = trio.Event()

    # --- life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Register the memory, then work until cancelled. Raises FatalError, alone or in a group. To be run once."""
        memory = self._memory
        try:
            register = Call("register", self._agent.register, (memory.address, memory.nbytes, memory.device), ignore)
            results = await self._calls.run([register, Call("metadata", self._agent.metadata, (), ignore)])
            for result in results:
                if isinstance(result, TransferError):
                    raise FatalError(f"the KV memory cannot be registered: {result}") from result
            self.metadata = sign(self._agent.name, results[1], self._token)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._expire_holds, name="transfer: hold timer")
                nursery.start_soon(self._poller.run, name="transfer: rounds")
                task_status.started()
        finally:
            await self._close()
        raise FatalError("a task of the transfer owner returned")

    async def _close(self) -> None:
        """Destroy the agent, bounded in time. Then nothing can land any more, so that pages leave the quarantine."""
        self._closed = True
        destroyed = await self._calls.close(self._agent.close)
        closed = TransferError("the transfer owner has been closed")
        self._confirmations.fail(closed)
        self._reads.fail_all(closed)
        if destroyed:
            self._reads.agent_destroyed()
        self._holds.end_all("released")

    async def wait_unfit(self) -> str:
        """Return once too much is in quarantine, with the reason: only the process's end frees such pages."""
        await self._became_unfit.wait()
        return self.unfit

    def stats(self) -> TransferStatistics:
        return TransferStatistics(
            running=len(self._reads),
            quarantined=self._reads.quarantine.count,
            peers=len(self._peers),
            holds=len(self._holds),
        )

    # --- peers, reported by any Master link

    def peer_up(self, link: object, node_id: str, metadata: TransferMetadata) -> None:
        """`link` reports a peer; it is admitted to the agent soon after. One that is not authentic is ignored.

        `metadata.agent` contains the incarnation of its node.
        """
        if not authentic(metadata, self._token):
            # The link and its other peers are none the worse for it.
            logger.warning("metadata of transfer peer %s is damaged or signed with another cluster token", node_id)
        elif metadata.agent != self._agent.name:
            self._peers.seen(metadata.agent, link, node_id=node_id, blob=metadata.blob)
            self._kick()

    def peer_down(self, link: object, node_id: str, incarnation: str) -> None:
        """A hint: `link` no longer sees that life of the peer. Removed when no other does and nothing is in flight."""
        self._peers.node_gone(node_id, incarnation, link)
        self._kick()

    def link_lost(self, link: object) -> None:
        """All that `link` has reported counts as gone."""
        self._peers.link_lost(link)
        self._kick()

    # --- the Prefill side

    def hold(
        self, pages: Sequence[int], tokens: int, on_end: Callable[[str], None], timeout: float, *, digest: int = 0
    ) -> Hold:
        """Offer `pages`, which the caller keeps pinned until `on_end(reason)`, to be pulled within `timeout` seconds.

        They hold the KV of a prompt of `tokens` tokens with this `prompt_digest`.

        `on_end` is called exactly once, synchronously: `pulled`, `expired`, or the reason given to `Hold.end`.
        """
        self._check_open()

        def encode(id_: int) -> bytes:
            memory = self._memory
            return msgspec.msgpack.encode(
                KvHandle(self._agent.name, id_, memory.address, memory.page_bytes, tuple(pages), tokens, digest)
            )

        hold = self._holds.add(encode, timeout, on_end)
        self._new_hold.set()
        self._kick()
        return hold

    async def _expire_holds(self) -> NoReturn:
        while True:
            self._new_hold = trio.Event()
            with trio.move_on_at(self._holds.next_deadline()):
                await self._new_hold.wait()
            self._holds.expire()

    # --- the Decode side

    def start_pull(self, handle: KvHandle, skip_pages: int, local: Sequence[int]) -> Pull:
        """Begin to read `handle.pages[skip_pages:]` into the `local` pages, each of them the caller's. See `Pull`.

        Raises TransferError when the handle does not fit; nothing is then started. With no page to read there is
        nothing to confirm: the pull is over at once.
        """
        self._check_open()
        remote = handle.pages[skip_pages:]
        if handle.page_bytes != self._memory.page_bytes:
            raise TransferError(f"{handle.agent} has pages of {handle.page_bytes} bytes, not {self._memory.page_bytes}")
        if skip_pages < 0 or len(remote) != len(local):
            raise TransferError(f"{len(handle.pages)} pages, {skip_pages} of them skipped, for {len(local)} local ones")
        if not 0 < handle.address < _MAX_ADDRESS or not all(0 <= page < _MAX_PAGE for page in remote):
            raise TransferError(f"the handle of {handle.agent} names impossible addresses")
        if not all(0 <= page < self._total_pages for page in local):
            raise TransferError(f"local pages outside of the pool of {self._total_pages}")
        pull = self._reads.start(handle, remote, local)
        if local:
            self._kick()
        return pull

    # --- rounds

    def _busy(self) -> bool:
        return self._reads.busy or (not self._wakes and bool(self._confirmations or len(self._holds)))

    async def _round(self) -> bool:
        self._progress = False
        calls = self._collect()
        patience = self._patience(calls)
        for call, result in zip(calls, await self._calls.run(calls, patience), strict=True):
            call.then(result)
        now = trio.current_time()
        if not self.unfit and (reason := self._reads.quarantine.over_limit(self._total_pages, now)) is not None:
            self.unfit = reason
            self._became_unfit.set()
        return self._progress

    def _patience(self, calls: Sequence[Call]) -> float:
        """Seconds that a round which only asks for news may wait for it, within the agent's thread."""
        if not self._busy() or any(call.name not in ("poll", "notifications") for call in calls):
            return 0.0
        return min(_PATIENCE, self._reads.next_due() - trio.current_time())

    def _collect(self) -> list[Call]:
        agent, now = self._agent, trio.current_time()
        # Reads first: a peer is removed only where none has begun.
        calls = self._reads.calls(now)
        for action in self._peers.actions():
            if isinstance(action, Add):
                calls.append(Call("add_peer", agent.add_peer, (action.blob,), partial(self._added, action.agent)))
            else:
                calls.append(
                    Call("remove_peer", agent.remove_peer, (action.agent,), partial(self._removed, action.agent))
                )
        for letter in self._confirmations.outgoing(now):
            args = (letter.peer, encode_note(letter.note))
            calls.append(Call("notify", agent.notify, args, partial(self._sent, letter)))
        calls.append(Call("notifications", agent.notifications, (), self._notified))
        return calls

    def _added(self, agent: str, result: str | TransferError) -> None:
        self._moved()
        if result == agent:
            self._peers.added(agent)
        else:
            self._peers.add_failed(agent)
            logger.warning("transfer peer %s was not admitted: %s", agent, result)
            self._reads.fail_queued(TransferError(f"{agent} cannot be reached: {result}"), agent)
            self._confirmations.unreachable(agent)

    def _removed(self, agent: str, result: TransferError | None) -> None:
        self._moved()
        self._peers.removed(agent)
        if result is not None:
            logger.warning("transfer peer %s was not removed cleanly: %s", agent, result)

    def _disconnected(self, agent: str, error: PeerDisconnectedError) -> None:
        """Tell everyone who waits for the peer."""
        if self._peers.disconnected(agent):
            logger.warning("transfer peer %s is gone: %s", agent, error)
        self._reads.fail_all(error, agent)
        self._confirmations.fail(error, agent)

    # --- notes

    def _notified(self, result: list[tuple[str, bytes]] | TransferError) -> None:
        if isinstance(result, TransferError):
            raise FatalError(f"notifications cannot be read: {result}") from result
        for sender, data in result:
            self._moved()
            self._confirmations.receive(sender, data, trio.current_time())

    def _sent(self, letter: Letter, result: TransferError | None) -> None:
        if result is None:
            return
        disconnected = isinstance(result, PeerDisconnectedError)
        self._confirmations.returned(letter, result, disconnected=disconnected)
        if isinstance(result, PeerDisconnectedError):
            self._disconnected(letter.peer, result)

    def _moved(self) -> None:
        """Something has happened: another round follows without a pause, for what it may have made possible."""
        self._progress = True
        self._kick()

    def _kick(self) -> None:
        self._poller.kick()
        self._calls.nudge()

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("the transfer owner has been closed")
