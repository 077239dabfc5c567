"""A worker process: loads the engine, runs the node, serves the status pages; if one fails, all stop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from pdserve import collector
from pdserve.errors import ConfigError
from pdserve.telemetry.listener import address_of, open_listener
from pdserve.telemetry.serving import serve_asgi
from pdserve.text.models import load_model_card, resolve_model
from pdserve.text.tokenizer import load_tokenizer
from pdserve.worker.masters import sources
from pdserve.worker.node import WorkerNode
from pdserve.worker.status import status_app
from pdserve.worker.thread import OwnerThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import DecodeConfig, PrefillConfig, WorkerConfig
    from pdserve.engine.base import Engine
    from pdserve.nurseries.drain import Drain
    from pdserve.text.models import ModelFiles
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.transfer.agent import TransferAgent
    from pdserve.wire.messages import ModelCard

log = logging.getLogger("pdserve.worker")

_LOAD_TIMEOUT = 600.0
"""Seconds for the weights to load: a large model from a slow disk."""
_STATUS_READER_TIMEOUT = 30.0


async def serve_worker(
    config: PrefillConfig | DecodeConfig, drain: Drain, *, make_agent: Callable[[str], TransferAgent]
) -> None:
    """Run one Prefill or Decode node until `drain`. Raises FatalError when its engine or transfer owner fails.

    Raises ConfigError where a flag has turned out to be unusable on this machine.
    """
    masters = sources(config.master_urls, config.link_ca)  # first: loading the engine can take minutes
    files = resolve_model(config.model)
    card = load_model_card(files, max_seq_len=config.max_seq_len)
    tokenizer = load_tokenizer(files)
    with OwnerThread("engine") as thread:
        engine = await thread.call(load_engine, config, files, card, tokenizer, timeout=_LOAD_TIMEOUT)
        node = WorkerNode(config, engine, tokenizer, make_agent=make_agent, thread=thread)
        listener = open_listener(config.status_host, config.status_port, user_timeout=_STATUS_READER_TIMEOUT)
        status_url = f"http://{address_of(listener)}"
        stop = trio.Event()

        async def serve_status(task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
            app = status_app(node.role, node.masters, node.metrics)
            await serve_asgi(app, [listener], stop=stop, graceful=1.0, task_status=task_status)

        async def run_node(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            await node.run(masters, status_url=status_url, task_status=task_status)

        async with trio.open_nursery() as nursery:
            await nursery.start(run_node, name="node")
            await nursery.start(serve_status, name="status pages")
            collector.relax()
            log.info(
                "%s node %s: %d KV pages of %d bytes, status on %s",
                node.role_name,
                node.node_id,
                engine.num_pages,
                engine.layout.page_bytes,
                status_url,
            )
            await drain.started.wait()
            log.info("draining (%s)", drain.reason)
            await node.drain()
            stop.set()


def load_engine(config: WorkerConfig, files: ModelFiles, card: ModelCard, tokenizer: Tokenizer) -> Engine:
    """The engine that `--engine` names, loaded. To be called on the thread that will run it."""
    if config.engine == "sim":
        from pdserve.engine.sim import SimEngine

        return SimEngine(
            card=card,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            num_pages=config.kv_tokens // config.page_size,
            page_size=config.page_size,
            prefill_tokens_per_s=config.sim_prefill_tokens_per_s,
            decode_ms=config.sim_decode_ms,
        )
    if files.path is None:
        raise ConfigError(f"--model {files.name} has no weights: it needs --engine sim")
    from pdserve.engine.torch_engine.runner import load_engine as load_torch_engine

    return load_torch_engine(
        files.path,
        name=files.name,
        card=card,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        page_size=config.page_size,
        kv_tokens=config.kv_tokens,
        max_seq_len=card.max_len,
        eos_token_ids=tokenizer.eos_token_ids,
    )
