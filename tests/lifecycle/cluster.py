"""Real Master and workers in virtual time: simulated engine, in-memory transfers, WebSockets over memory streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import trio.testing
from trio_websocket import wrap_client_stream

from pdserve.config import DecodeConfig, MasterConfig, PrefillConfig
from pdserve.errors import FatalError
from pdserve.ids import RequestIds, new_incarnation
from pdserve.master.app import Master
from pdserve.master.coordinator import Coordinator
from pdserve.master.links import NodeLinks
from pdserve.master.registry import Registry
from pdserve.master.selector import Selector
from pdserve.master.service import ChoiceFailed, GenerationRequest
from pdserve.nurseries.groups import leaves
from pdserve.telemetry.metrics import MasterMetrics
from pdserve.text.models import load_model_card, resolve_model
from pdserve.text.tokenizer import load_tokenizer
from pdserve.transfer.memory_agent import MemoryAgent, MemoryNetwork
from pdserve.wire.messages import SamplingParams
from pdserve.worker.app import load_engine
from pdserve.worker.node import WorkerNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.worker.decode import DecodeNode

FILES = resolve_model("sim-bytes")
CARD = load_model_card(FILES, max_seq_len=4096)
TOKENIZER = load_tokenizer(FILES)
STEP = 0.005
BASE = {
    "model": "sim-bytes",
    "engine": "sim",
    "kv_tokens": 4096,
    "sim_decode_ms": STEP * 1000,
    "max_running_requests": 4,
}


class Cluster:
    """One Master and the nodes that were started with it; `network` is shared where nodes serve several Masters."""

    def __init__(self, nursery: trio.Nursery, *, network: MemoryNetwork | None = None, **master: object) -> None:
        config = MasterConfig(model="sim-bytes", **master)
        self.nursery = nursery
        self.registry, incarnation, metrics = Registry(), new_incarnation(), MasterMetrics()
        self.links = NodeLinks(
            self.registry,
            metrics,
            CARD,
            incarnation,
            token=config.cluster_token,
            heartbeat_interval=config.heartbeat_interval,
            need_admission=not config.disable_admission,
        )
        coordinator = Coordinator(
            self.registry,
            Selector(),
            RequestIds(incarnation),
            metrics,
            nursery,
            admission_timeout=None if config.disable_admission else config.admission_timeout,
            reservation_ttl=config.reservation_ttl,
            total_deadline=config.total_deadline,
            retry=config.retry,
        )
        self.master = Master(self.registry, coordinator, CARD)
        self.metrics = metrics
        self.network = network or MemoryNetwork()
        self.nodes: list[WorkerNode] = []
        self.scopes: dict[str, trio.CancelScope] = {}
        self.dead: set[str] = set()
        """Nodes, by incarnation, whose engine was made to fail."""
        self.server_ends: dict[str, trio.StapledStream] = {}
        self.client_ends: dict[str, trio.StapledStream] = {}

    def dialler(self, node_id: str):
        """Dials this Master for a node."""

        async def dial(nursery: trio.Nursery):
            client, server = trio.testing.memory_stream_pair()
            self.client_ends[node_id], self.server_ends[node_id] = client, server
            self.nursery.start_soon(self.links.handle, server)
            return await wrap_client_stream(nursery, client, "master", "/")

        return dial

    def cut(self, node_id: str) -> None:
        """The link of that node breaks."""
        self.server_ends[node_id].send_stream.close()
        self.server_ends[node_id].receive_stream.close()
        self.client_ends[node_id].send_stream.close()
        self.client_ends[node_id].receive_stream.close()

    def node(self, node_id: str) -> WorkerNode:
        return next(node for node in self.nodes if node.node_id == node_id)

    async def start(self, config: PrefillConfig | DecodeConfig, others: Sequence[Cluster] = ()) -> WorkerNode:
        """A node that serves this Master and those of `others`."""
        engine = load_engine(config, FILES, CARD, TOKENIZER)
        node = WorkerNode(
            config,
            engine,
            TOKENIZER,
            make_agent=lambda name: MemoryAgent(name, self.network, clock=trio.current_time, delay=None),
            thread=None,
        )

        async def run(task_status=trio.TASK_STATUS_IGNORED):
            dials = [(f"master {i}", it.dialler(node.node_id)) for i, it in enumerate((self, *others))]
            try:
                with trio.CancelScope() as scope:
                    self.scopes[node.node_id] = scope
                    await node.run(dials, task_status=task_status)
            except Exception as error:
                if node.incarnation not in self.dead or not all(isinstance(leaf, FatalError) for leaf in leaves(error)):
                    raise
            finally:
                self.nodes = [one for one in self.nodes if one is not node]

        await self.nursery.start(run)
        self.nodes.append(node)
        with trio.fail_after(30):
            for it in (self, *others):
                while not any(known.hello.incarnation == node.incarnation for known in it.registry.nodes()):
                    await trio.sleep(0.01)
        return node

    def mute(self, node_id: str) -> None:
        """Nothing passes between that node and the Master any more, and nothing is closed."""
        server = self.server_ends[node_id]
        server.send_stream.send_all_hook = trio.sleep_forever
        server.receive_stream._incoming._data.clear()
        server.receive_stream.receive_some_hook = trio.sleep_forever
        client = self.client_ends[node_id]
        client.send_stream.close_hook = client.receive_stream.close_hook = None
        client.send_stream.send_all_hook = trio.sleep_forever

    def request(self, prompt, label="r", accepted_at=None, n=1, **params) -> GenerationRequest:
        now = trio.current_time() if accepted_at is None else accepted_at
        params = {"temperature": 0.0, **params}
        return GenerationRequest(tuple(prompt), SamplingParams(**params), label, now, n)

    async def ids(self, prompt, **params) -> list[int]:
        with trio.fail_after(120):
            async with self.master.generate(self.request(prompt, **params)) as output:
                return [token async for delta in output for token in delta.token_ids]

    async def choices(self, prompt, n, **params) -> dict[int, list[int] | ChoiceFailed]:
        """The ids of each choice, or how it failed."""
        found: dict = {}
        with trio.fail_after(120):
            async with self.master.generate(self.request(prompt, n=n, **params)) as output:
                async for item in output:
                    if isinstance(item, ChoiceFailed):
                        found[item.choice] = item
                    else:
                        found.setdefault(item.choice, []).extend(item.token_ids)
        return found

    async def quiet(self, within: float = 1.0) -> None:
        """Every pool is at zero within `within` virtual seconds."""
        with trio.move_on_after(within):
            while True:
                try:
                    for node in self.nodes:
                        node.check_integrity(quiet=True)
                except AssertionError:
                    await trio.sleep(0.001)
                else:
                    return
        for node in self.nodes:
            node.check_integrity(quiet=True)


def note_grants(role: DecodeNode) -> list[str]:
    """The ids of requests, in the order in which they are granted slots and pages from now on."""
    granted, enter = [], role._enter

    def entered(*args):
        group = enter(*args)
        if group is not None:
            grant = group.place.grant
            group.place.grant = lambda room: (granted.append(group.id), grant(room))
        return group

    role._enter = entered
    return granted
