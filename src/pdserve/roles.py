"""One process of each role: what the command line runs. Each returns after a drain and raises FatalError otherwise."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import trio

from pdserve import collector, control, descriptors
from pdserve.http.app import build_app
from pdserve.master.app import open_master
from pdserve.nurseries.drain import Drain
from pdserve.telemetry.listener import address_of, open_listener
from pdserve.telemetry.metrics import MasterMetrics
from pdserve.telemetry.serving import serve_asgi
from pdserve.text.models import load_model_card, resolve_model
from pdserve.text.template import ChatTemplate
from pdserve.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pdserve.config import DecodeConfig, MasterConfig, PrefillConfig, WorkerConfig
    from pdserve.transfer.agent import TransferAgent

log = logging.getLogger("pdserve")

_LAST_BYTES = 2.0
"""Seconds for clients to be told how their requests ended, when the drain's time is over."""


async def run_master(config: MasterConfig) -> None:
    """HTTP for clients, links for nodes. Drains on signals, and when the process that started it is gone."""
    descriptors.raise_limit()
    files = resolve_model(config.model)
    card = load_model_card(files, max_seq_len=config.max_seq_len)
    tokenizer = load_tokenizer(files)
    source = tokenizer.chat_template
    template = ChatTemplate(source, bos=tokenizer.bos_token, eos=tokenizer.eos_token) if source else None
    metrics, drain, stop = MasterMetrics(), Drain(), trio.Event()
    links = open_listener(config.link_host, config.link_port, user_timeout=None)
    front = open_listener(config.host, config.port, user_timeout=config.slow_reader_timeout)
    async with trio.open_nursery() as nursery:
        _watch(nursery, drain)
        async with open_master(config, card, metrics, [links]) as master:
            app = build_app(
                master,
                tokenizer=tokenizer,
                template=template,
                model_name=files.name,
                metrics=metrics,
                api_keys=config.api_key,
                max_body_bytes=config.max_body_bytes,
                is_draining=lambda: drain.draining,
                slow_reader_timeout=config.slow_reader_timeout,
            )

            async def serve(task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
                await serve_asgi(
                    app,
                    [front],
                    stop=stop,
                    graceful=config.drain_timeout,
                    certfile=str(config.tls_cert) if config.tls_cert else None,
                    keyfile=str(config.tls_key) if config.tls_key else None,
                    task_status=task_status,
                )
                served.set()

            served = trio.Event()
            urls = await nursery.start(serve, name="http")
            collector.relax()
            log.info("HTTP on %s, node links on %s", ", ".join(urls), address_of(links))
            await drain.started.wait()
            master.draining = True
            deadline = trio.current_time() + config.drain_timeout
            with trio.move_on_at(deadline):
                await master.coordinator.idle.wait()
            master.coordinator.abort()
            stop.set()
            with trio.move_on_at(max(deadline, trio.current_time() + _LAST_BYTES)):
                await served.wait()
        nursery.cancel_scope.cancel()


async def run_prefill(config: PrefillConfig) -> None:
    """Compute prompts, hold their KV for Decode."""
    await _run_worker(config)


async def run_decode(config: DecodeConfig) -> None:
    """Admit requests, pull their KV, generate."""
    await _run_worker(config)


async def _run_worker(config: PrefillConfig | DecodeConfig) -> None:
    from pdserve.worker.app import serve_worker

    descriptors.raise_limit()
    drain = Drain()
    async with trio.open_nursery() as nursery:
        _watch(nursery, drain)
        await serve_worker(config, drain, make_agent=lambda name: _nixl_agent(name, config))
        nursery.cancel_scope.cancel()


def _nixl_agent(name: str, config: WorkerConfig) -> TransferAgent:
    from pdserve.transfer.nixl_agent import NixlAgent, prepare_environment

    if config.ucx_net_devices:
        os.environ.setdefault("UCX_NET_DEVICES", config.ucx_net_devices)
    prepare_environment(loopback=config.ucx_net_devices == "lo")
    return NixlAgent(name)


def _watch(nursery: trio.Nursery, drain: Drain) -> None:
    """Signals and the end of the control pipe start the drain; a second signal exits at once."""
    # Under `up`, Ctrl-C and the end of the terminal are meant for `up` alone, which drains its children front to back.
    signals = (signal.SIGTERM,) if control.under_up() else None
    nursery.start_soon(partial(drain.on_signals, signals=signals), name="signals")

    def leave() -> None:
        if drain.draining:
            os._exit(0)
        drain.start("the process that started this one is gone")

    nursery.start_soon(control.watch_control, leave, name="control pipe")
