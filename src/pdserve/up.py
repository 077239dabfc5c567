"""`up`: a whole service on one machine as a supervised tree of processes.

The children are `python -m pdserve master | prefill | decode`, the same as in a real deployment, each restarted on its
own. A drain runs front to back: first the Master, so that nothing new comes in and what runs is finished, then the
workers. Whatever happens, no child is left behind.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import shlex
import signal
import ssl
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from pdserve import flags
from pdserve.config import (
    CommonConfig,
    DecodeConfig,
    MasterConfig,
    PrefillConfig,
    UpConfig,
    WorkerConfig,
    process_name,
)
from pdserve.errors import FatalError, PdserveError
from pdserve.nurseries.drain import STOPPING, hangup
from pdserve.nurseries.supervisor import ChildEvent, ChildSpec, Intensity, one_for_one
from pdserve.ports import hold_ports, with_usable_ports
from pdserve.process import ChildProcess, describe_exit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

log = logging.getLogger("pdserve.up")

RoleT = TypeVar("RoleT", bound=CommonConfig)

_POLL = 0.2
"""Seconds between two looks at /readyz while the service starts."""
_PROBE_TIMEOUT = 5.0
_MARGIN = 5.0
"""Seconds that a child may take to leave on top of its own drain."""
_LEAVE = 2.0
"""Seconds between the end of the control pipe and SIGKILL."""
_SAME_SIGNAL = 0.5
"""Seconds within which a signal is the first one again: timeout(1), for one, sends it to a process and to its group."""
_USELESS_TO_RESTART = (2, 3)
"""Exit codes for an unusable flag and for something not installed: the next life would end the same way."""


class ChildExitedError(PdserveError):
    """A child process ended though nobody asked it to."""

    def __repr__(self) -> str:  # part of the last line of `up`, for people
        return str(self)


class ChildRefusedError(FatalError):
    """A child cannot run with this configuration on this machine; its own message has said why."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@attrs.frozen
class Child:
    """What one child process is started with."""

    name: str
    role: str
    config: CommonConfig


def plan(config: UpConfig, cores: int) -> list[Child]:
    """The children in the order in which they start. They are stopped in reverse order, so the Master comes last."""
    share = max(1, cores // (config.prefill + config.decode))
    scheme = "ws" if config.link_tls_cert is None else "wss"
    own = f"{scheme}://{url_host(config.link_host)}:{config.link_port}"
    children: list[Child] = []
    roles: tuple[tuple[str, type[WorkerConfig], int], ...] = (
        ("decode", DecodeConfig, config.decode),
        ("prefill", PrefillConfig, config.prefill),
    )
    for role, kind, count in roles:
        for _ in range(count):
            number = len(children)
            worker = _part(
                config,
                kind,
                model=config.model_name,
                masters=",".join(filter(None, (own, config.masters))),
                # One name through all restarts, so that a new life replaces the old one at the Master.
                node_id=f"{config.node_id or process_name()}-{role}-{number}",
                threads=config.threads or share,
                status_port=config.status_port + number if config.status_port else 0,
            )
            children.append(Child(f"{role}-{number}", role, worker))
    children.append(Child("master", "master", _part(config, MasterConfig, model=config.model_name)))
    return children


def _part(config: UpConfig, kind: type[RoleT], **changes: object) -> RoleT:
    """The fields of `config` that `kind` has."""
    values: dict[str, Any] = {field.name: getattr(config, field.name) for field in attrs.fields(kind)}
    values.update(changes)
    return kind(**values)


def url_host(host: str) -> str:
    """`host` as it goes into a URL that this machine can open: a wildcard becomes loopback, IPv6 gets its brackets."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class _Tree:
    """The running children of one `up`."""

    def __init__(self, config: UpConfig, command: Sequence[str]) -> None:
        self._command = command
        own = flags.variables() | {"PDSERVE_CONFIG"}
        # Everything a child is to know is on its command line; a variable must not change what a flag has reset.
        self._env = {name: value for name, value in os.environ.items() if name not in own}
        self._drain_timeout = config.drain_timeout
        self._running: set[ChildProcess] = set()
        self._killed = trio.Event()

    def spec(self, child: Child) -> ChildSpec:
        """How the supervisor is to run this child."""
        lives = 0

        async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            nonlocal lives
            lives += 1
            await self._run(child, lives - 1, task_status)

        return ChildSpec(child.name, run, grace=self._drain_timeout + _MARGIN + 2 * _LEAVE)

    def kill(self) -> None:
        """SIGKILL for every child, now. No child starts any more; what ends is not a failure."""
        self._killed.set()
        for process in self._running:
            process.kill()

    async def _run(self, child: Child, restarts: int, task_status: trio.TaskStatus[None]) -> None:
        """One life of a child. Cancelled, it drains the child until it has left. Raises if it ends by itself."""
        if self._killed.is_set():
            await trio.sleep_forever()  # the supervisor is stopping and comes to this child soon
        words = [*self._command, child.role, *flags.arguments(child.config)]
        env = self._env | flags.secrets(child.config)
        with ChildProcess(words, env, restarts=restarts) as process:
            self._running.add(process)
            try:
                log.info("%s starts: pid %d", child.name, process.pid)
                task_status.started()
                try:
                    status = await process.wait()
                except trio.Cancelled:
                    await self._drain(child, process)
                    raise
            finally:
                self._running.discard(process)
        if self._killed.is_set():
            await trio.sleep_forever()
        if status in _USELESS_TO_RESTART:
            raise ChildRefusedError(f"{child.name} cannot start, see its message above", status)
        raise ChildExitedError(f"{child.name} {describe_exit(status)}")

    async def _drain(self, child: Child, process: ChildProcess) -> None:
        """SIGTERM, then the end of the pipe, then SIGKILL by leaving the context: each if the former was not heeded."""
        if self._killed.is_set():
            return
        with trio.CancelScope(shield=True):
            process.terminate()
            with trio.move_on_after(self._drain_timeout + _MARGIN):
                await process.wait()
                return
            log.warning("%s has not drained in time", child.name)
            process.leave()
            with trio.move_on_after(_LEAVE):
                await process.wait()
                return
            log.error("%s does not leave: killing it", child.name)


async def run_up(config: UpConfig, command: Sequence[str] = (sys.executable, "-m", "pdserve")) -> None:
    """Run the service until the first SIGINT, SIGTERM or SIGHUP, drain it, and return. `command` starts a role.

    A second SIGINT or SIGTERM kills all children and raises `KeyboardInterrupt`. Raises `IntensityExceeded` when
    children fail too often, with the last failure as its cause.
    """
    config = with_usable_ports(config)
    with hold_ports(config):
        await _run_tree(config, command)


async def _run_tree(config: UpConfig, command: Sequence[str]) -> None:
    tree = _Tree(config, command)
    children = plan(config, len(os.sched_getaffinity(0)))
    stop = trio.Event()
    interrupted = False

    async def obey(signals: AsyncIterator[int]) -> None:
        nonlocal interrupted
        first = -math.inf
        async for number in signals:
            name = signal.Signals(number).name
            if not stop.is_set():
                log.info("%s: draining, again to stop at once", name)
                first = trio.current_time()
                stop.set()
            elif number != signal.SIGHUP and trio.current_time() - first > _SAME_SIGNAL:
                log.warning("%s again: killing all children", name)
                interrupted = True
                tree.kill()

    with trio.open_signal_receiver(*STOPPING, *hangup()) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey, signals, name="up.signals")
            nursery.start_soon(_announce, config, _node_ids(children), stop, name="up.ready")
            await one_for_one(
                [tree.spec(child) for child in children],
                intensity=Intensity(config.restart_intensity, config.restart_window),
                on_event=_Log(),
                stop=stop,
            )
            nursery.cancel_scope.cancel()
    if interrupted:
        raise KeyboardInterrupt
    log.info("stopped")


class _Log:
    """Says what happens to the children, at the moment when it does."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._failed: str | None = None
        self._gave_up = False

    def __call__(self, event: ChildEvent) -> None:
        match event.kind:
            case "failed":
                log.error("%s", event.error)
                self._failed = event.child
                # The supervisor says in the same step that it restarts a child, or does not: then all comes to its end.
                self._token.run_sync_soon(self._conclude)
            case "restarting":
                self._failed = None
                log.warning("%s restarts in %.1f s", event.child, event.delay)
            case "overran":
                log.error("%s did not stop in time", event.child)
            case _:
                log.debug("%s %s", event.child, event.kind)

    def _conclude(self) -> None:
        if self._failed is not None and not self._gave_up:
            log.error("giving up: draining the others")
            self._gave_up = True
        self._failed = None


def _node_ids(children: Sequence[Child]) -> frozenset[str]:
    return frozenset(child.config.node_id for child in children if isinstance(child.config, WorkerConfig))


async def _announce(config: UpConfig, wanted: frozenset[str], stop: trio.Event) -> None:
    """Print the one ready line once the Master serves and all workers, by their ids, are registered with it."""
    said: list[str] = []
    while not stop.is_set():
        with suppress(OSError, ValueError, http.client.HTTPException):
            status, document = await trio.to_thread.run_sync(probe, config, abandon_on_cancel=True)
            there = wanted & {str(node.get("node")) for node in document.get("nodes", ())}
            if status == 200 and there == wanted:
                print(ready_line(config, str(document.get("model", config.model_name))), flush=True)
                return
            reasons = [str(reason) for reason in document.get("reasons", ())]
            if reasons != said:
                why = "; ".join(reasons) or "waiting for more"
                log.info("not ready yet, %d of %d workers: %s", len(there), len(wanted), why)
                said = reasons
        await trio.sleep(_POLL)


def probe(config: UpConfig) -> tuple[int, dict[str, Any]]:
    """What /readyz of the Master answers, within seconds. Raises OSError, ValueError or HTTPException if nothing."""
    host = url_host(config.host).strip("[]")
    connection: http.client.HTTPConnection
    if config.tls_cert is None:
        connection = http.client.HTTPConnection(host, config.port, timeout=_PROBE_TIMEOUT)
    else:
        # Our own child on our own machine: the certificate is for the clients, who call it by another name.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, config.port, timeout=_PROBE_TIMEOUT, context=context)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        document = json.loads(response.read())
    finally:
        connection.close()
    if not isinstance(document, dict):
        raise ValueError("/readyz did not answer with an object")
    return response.status, document


def ready_line(config: UpConfig, model: str) -> str:
    """Where the service is, and a command to paste that streams an answer."""
    url = f"{'http' if config.tls_cert is None else 'https'}://{url_host(config.host)}:{config.port}"
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    words = ["curl", "-N", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", json.dumps(body)]
    if config.tls_cert is not None:
        words.insert(1, "-k")
    command = " ".join(map(shlex.quote, words))
    if config.api_key:
        command += ' -H "authorization: Bearer $PDSERVE_API_KEY"'  # the key itself is not for the screen
    return f"pdserve is ready at {url}  try: {command}"
