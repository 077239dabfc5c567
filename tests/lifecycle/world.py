"""A cluster with the HTTP app on top, to whose nodes everything can happen; what dies is started again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from lifecycle.client import Client
from lifecycle.cluster import BASE, TOKENIZER, Cluster
from pdserve.config import DecodeConfig, PrefillConfig
from pdserve.errors import TransferError
from pdserve.http.app import build_app

if TYPE_CHECKING:
    from pdserve.worker.node import WorkerNode

HEARTBEAT = 1.0
SAMPLED = {"temperature": 1.0, "seed": 3}


class World(Cluster):
    """`nodes` of each role under one Master."""

    def __init__(self, nursery: trio.Nursery, nodes: int, **master: object) -> None:
        super().__init__(nursery, **master)
        self.names = [f"{role}{number}" for number in range(nodes) for role in "pd"]
        self.app = build_app(
            self.master,
            tokenizer=TOKENIZER,
            template=None,
            model_name="sim-bytes",
            metrics=self.metrics,
            is_draining=lambda: False,
        )

    def client(self, prompt: tuple[int, ...], max_tokens: int, n: int) -> Client:
        body = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "stream": True, "return_token_ids": True}
        return Client(self.app, {**body, **SAMPLED})

    async def start_all(self) -> None:
        for name in self.names:
            await self.start(self.config(name))

    def config(self, node_id: str) -> PrefillConfig | DecodeConfig:
        kind = PrefillConfig if node_id.startswith("p") else DecodeConfig
        return kind(**BASE, node_id=node_id, heartbeat_interval=HEARTBEAT)

    def strike(self, what: str, victim: str) -> None:
        """Let it happen to that node, synchronously, in the middle of whatever runs. Nothing, where it is not there.

        `lost`, `silent` (its link), `replaced`, `raises` (its engine), `drains`; `transfer fails`, whoever reads next.
        """
        if what == "transfer fails":
            self._fail_transfers()
        elif self._living(victim) is None:
            pass
        elif what == "lost":
            self.cut(victim)
        elif what == "silent":
            self.mute(victim)
        elif what == "replaced":
            self.nursery.start_soon(self._replace, victim)
        elif what == "drains":
            self.nursery.start_soon(self._drain, victim)
        else:
            self._fail_engine(victim)

    def forgive(self) -> None:
        """A failure that nothing has met until now stays away."""
        self.network._failures.clear()
        for node in self.nodes:
            if node.incarnation in self.dead:
                vars(node.loop.engine).pop("step", None)

    async def settled(self, within: float) -> None:
        """Nothing is in use: pools, requests, gauges. Raises AssertionError after so many seconds."""
        await self.quiet(within)
        assert not self.master.coordinator.snapshot(), "the Master still has requests"
        in_flight = self.metrics.registry.get_sample_value(
            "pdserve_requests_in_flight", {"endpoint": "/v1/completions"}
        )
        assert in_flight in (0, None)

    def _living(self, node_id: str) -> WorkerNode | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def _fail_transfers(self) -> None:
        reads = [read for agent in self.network._agents.values() for read in agent._reads.values() if not read.done]
        for read in reads:
            read.failure = TransferError("failed on purpose")
        if not reads:
            self.network.fail_next(TransferError("failed on purpose"))

    def _fail_engine(self, victim: str) -> None:
        node = self.node(victim)
        self.dead.add(node.incarnation)

        def step(plan: object) -> Any:
            self.nursery.start_soon(self._start_again, node)
            raise RuntimeError("failed on purpose")

        node.loop.engine.step = step

    async def _drain(self, victim: str) -> None:
        node = self.node(victim)
        await node.drain()
        await self._start_again(node)

    async def _start_again(self, node: WorkerNode) -> None:
        """What the supervisor of a process does."""
        while node in self.nodes:
            await trio.sleep(0.05)
        await trio.sleep(0.3)
        if self._living(node.node_id) is None:
            await self.start(self.config(node.node_id))

    async def _replace(self, victim: str) -> None:
        """A second life registers while the first one still thinks that it is there; that one never comes back."""
        old, scope = self.node(victim), self.scopes[victim]

        async def never(nursery: trio.Nursery) -> None:
            await trio.sleep_forever()

        for link in old.links:
            link._dial = never
        await self.start(self.config(victim))
        await trio.sleep(1)
        if old in self.nodes:
            self.nodes.remove(old)
            old.check_integrity(quiet=True)
        scope.cancel()
