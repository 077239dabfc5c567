"""A worker process: engine, transfer owner, role, links, status pages, all in one nursery; one fails, all stop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from pdserve.config import DecodeConfig, PrefillConfig, parse_faults
from pdserve.engine.radix import KvCache
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.slots import SlotPool
from pdserve.errors import ConfigError
from pdserve.ids import new_incarnation
from pdserve.telemetry.metrics import WorkerMetrics
from pdserve.telemetry.serving import open_listener, serve_asgi
from pdserve.text.models import load_model_card, resolve_model
from pdserve.text.tokenizer import load_tokenizer
from pdserve.transfer.owner import TransferOwner
from pdserve.wire.handshake import DECODE_ADMISSION, PROTOCOL_MAX, PROTOCOL_MIN
from pdserve.wire.messages import Hello
from pdserve.worker.decode import DecodeNode
from pdserve.worker.engine_loop import EngineLoop
from pdserve.worker.link import MasterLink
from pdserve.worker.prefill import PrefillNode
from pdserve.worker.status import status_app
from pdserve.worker.thread import OwnerThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import WorkerConfig
    from pdserve.engine.base import Engine
    from pdserve.nurseries.drain import Drain
    from pdserve.text.models import ModelFiles
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.transfer.agent import TransferAgent
    from pdserve.wire.messages import ModelCard, Role

log = logging.getLogger("pdserve.worker")

_LOAD_TIMEOUT = 600.0
"""Seconds for the weights to load: a large model from a slow disk."""
_DRAIN_POLL = 0.02


async def serve_worker(
    config: PrefillConfig | DecodeConfig,
    drain: Drain,
    *,
    make_agent: Callable[[str], TransferAgent],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one Prefill or Decode node until `drain`. Raises FatalError when the engine or the transfer owner fails.

    `make_agent` gets the agent's name, unique to this life of the process. After `drain` nothing new is taken, what
    runs gets `--drain-timeout` seconds, then the links are closed with 1001.
    """
    role_name: Role = "prefill" if isinstance(config, PrefillConfig) else "decode"
    node_id, incarnation, faults = config.node_name(role_name), new_incarnation(), parse_faults(config.faults)
    files = resolve_model(config.model)
    card = load_model_card(files, max_seq_len=config.max_seq_len)
    tokenizer = load_tokenizer(files)
    metrics = WorkerMetrics()
    with OwnerThread(f"{role_name} engine") as thread:
        engine = await thread.call(_load_engine, config, files, card, tokenizer, timeout=_LOAD_TIMEOUT)
        cache = KvCache(engine.num_pages, engine.layout.page_size)
        slots = SlotPool(config.max_running_requests)
        share = config.hold_share if isinstance(config, PrefillConfig) else 1.0
        scheduler = Scheduler(
            cache,
            slots,
            eos=engine.eos_token_ids,
            chunk_tokens=config.chunk_tokens,
            max_seq_len=card.max_len,
            pinned_share=share,
        )
        loop = EngineLoop(
            engine,
            scheduler,
            thread=thread if engine.threaded else None,
            step_timeout=config.step_timeout,
            on_step=metrics.step,
            hang_after=faults.step_hang_after,
        )
        failures = iter(range(faults.transfer_fail)) if faults.transfer_fail >= 0 else iter(int, 1)
        owner = TransferOwner(
            make_agent(f"{node_id}-{incarnation}"),
            engine.memory,
            token=config.cluster_token,
            threaded=True,
            call_timeout=config.step_timeout,
            confirm_timeout=config.confirm_timeout,
            transfer_timeout=config.transfer_timeout,
            cache=cache,
            delay=faults.transfer_delay,
            fail=lambda: next(failures, None) is not None,
        )
        node: PrefillNode | DecodeNode
        if isinstance(config, PrefillConfig):
            node = PrefillNode(config, loop, cache, owner, metrics, omit_first_token=faults.omit_first_token)
        else:
            node = DecodeNode(config, loop, cache, slots, owner, tokenizer, metrics)

        def refresh() -> None:
            metrics.set_stats(node.stats())
            metrics.set_slots(used=slots.used, queued=scheduler.waiting)
            metrics.set_holds(owner.stats().holds)

        metrics.refresh = refresh
        listener = open_listener(config.status_host, config.status_port, user_timeout=30.0)
        host, port = listener.getsockname()[:2]
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(owner.run, name="transfer owner")
            nursery.start_soon(loop.run, name="engine loop")
            hello = Hello(
                protocol_min=PROTOCOL_MIN,
                protocol_max=PROTOCOL_MAX + faults.protocol_bump,
                role=role_name,
                node_id=node_id,
                incarnation=incarnation,
                model=card,
                layout=engine.layout,
                transfer=owner.metadata,
                capacity=config.max_running_requests,
                capabilities=_capabilities(config),
                status_url=f"http://{host}:{port}",
            )
            links = [
                MasterLink(
                    url,
                    hello,
                    node,
                    owner,
                    token=config.cluster_token,
                    heartbeat_interval=config.heartbeat_interval,
                    ca=config.link_ca,
                )
                for url in config.master_urls
            ]
            async with trio.open_nursery() as link_nursery:
                for link in links:
                    link_nursery.start_soon(link.run, name=f"master {link.url}")
                app = status_app(node, links, metrics)
                await nursery.start(_serve_status, app, listener, stop, name="status pages")
                log.info(
                    "%s node %s: %d pages, status on http://%s:%d", role_name, node_id, engine.num_pages, host, port
                )
                task_status.started()
                await drain.started.wait()
                node.draining = True
                for link in links:
                    link.announce_drain()
                with trio.move_on_after(config.drain_timeout):
                    while not node.idle:
                        await trio.sleep(_DRAIN_POLL)
                link_nursery.cancel_scope.cancel()
            stop.set()
            nursery.cancel_scope.cancel()


def _capabilities(config: PrefillConfig | DecodeConfig) -> tuple[str, ...]:
    if isinstance(config, DecodeConfig) and not config.disable_admission:
        return (DECODE_ADMISSION,)
    return ()


async def _serve_status(
    app: object,
    listener: object,
    stop: trio.Event,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    await serve_asgi(app, [listener], stop=stop, graceful=1.0, task_status=task_status)  # type: ignore[list-item]


def _load_engine(config: WorkerConfig, files: ModelFiles, card: ModelCard, tokenizer: Tokenizer) -> Engine:
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
    from pdserve.engine.torch_engine.runner import load_engine

    return load_engine(
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
