"""A real Master, Prefill and Decode node in one process: simulated engine, memory for NIXL, WebSockets over streams in
memory. In real time, or in virtual time, where computing takes no time at all.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
import trio.testing
from trio_websocket import wrap_client_stream
from watched_pool import WatchedPool

from pdserve.config import DecodeConfig, PrefillConfig
from pdserve.ids import RequestIds, new_incarnation
from pdserve.master.coordinator import Coordinator
from pdserve.master.links import NodeLinks
from pdserve.master.registry import Registry
from pdserve.master.selector import Selector
from pdserve.telemetry.metrics import MasterMetrics
from pdserve.text.models import load_model_card, resolve_model
from pdserve.text.tokenizer import load_tokenizer
from pdserve.transfer.memory_agent import MemoryAgent, MemoryNetwork
from pdserve.worker.app import load_engine
from pdserve.worker.decode import DecodeNode
from pdserve.worker.node import WorkerNode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_websocket import WebSocketConnection

_MODEL = "sim-bytes"


@asynccontextmanager
async def open_whole_stack(*, slots: int, queue: int, step: float) -> AsyncIterator[tuple[Coordinator, WatchedPool]]:
    """A cluster of one node each, both registered. `step`: seconds of one decode step."""
    files = resolve_model(_MODEL)
    card, tokenizer = load_model_card(files, max_seq_len=4096), load_tokenizer(files)
    registry, incarnation, metrics = Registry(), new_incarnation(), MasterMetrics()
    # A process this busy answers late, and its virtual seconds are long: nobody is to be lost for it.
    links = NodeLinks(registry, metrics, card, incarnation, token="", heartbeat_interval=60.0, need_admission=True)
    network, pool = MemoryNetwork(), WatchedPool(slots, queue)

    async with trio.open_nursery() as nursery:

        async def dial(connection: trio.Nursery) -> WebSocketConnection:
            client, server = trio.testing.memory_stream_pair()
            nursery.start_soon(links.handle, server)
            return await wrap_client_stream(connection, client, "master", "/")  # type: ignore[arg-type]

        for role in (PrefillConfig, DecodeConfig):
            config = role(
                model=_MODEL,
                engine="sim",
                kv_tokens=65536,
                max_running_requests=slots,
                heartbeat_interval=60.0,
                sim_prefill_tokens_per_s=1e6,
                sim_decode_ms=step * 1000,
            )
            engine = load_engine(config, files, card, tokenizer)
            node = WorkerNode(
                config,
                engine,
                tokenizer,
                make_agent=lambda name: MemoryAgent(name, network, clock=trio.current_time, delay=None),
                thread=None,
            )
            if isinstance(node.role, DecodeNode):
                node.role.pool = pool
            await nursery.start(node.run, [("memory", dial)])
        with trio.fail_after(30):
            while len(registry.nodes()) < 2:  # noqa: ASYNC110 - a registry tells nobody
                await trio.sleep(0.01)
        ids = RequestIds(incarnation)
        yield Coordinator(registry, Selector(), ids, metrics, nursery, admission_timeout=30.0), pool
        nursery.cancel_scope.cancel()
