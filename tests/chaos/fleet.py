"""Two nodes of each role under two Masters: one of `up`, and one beside it that is started again when it ends."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import httpx
import trio

from e2e.service import OF_REQUESTS, Service, alive, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

NAMES = {
    "master": ("master-0", "master-1"),
    "prefill": ("prefill-2", "prefill-3"),
    "decode": ("decode-0", "decode-1"),
}
"""The processes of each role; those of `up` as it numbers them."""
MASTERS = NAMES["master"]
WORKERS = NAMES["prefill"] + NAMES["decode"]
HEAL_TIMEOUT = 60.0
QUIET_TIMEOUT = 20.0
_EXIT_TIMEOUT = 30.0
_LOOK = 0.1


@attrs.define(eq=False)
class Seat:
    """A Master's place: its ports stay, its processes come and go."""

    name: str
    port: int
    link_port: int
    _outages: list[list[float]] = attrs.field(factory=list)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """While the block runs the Master is away because we wanted it."""
        times = [trio.current_time(), math.inf]
        self._outages.append(times)
        yield
        times[1] = trio.current_time()

    def was_down(self, since: float) -> bool:
        return any(end >= since for _, end in self._outages)


class Fleet:
    """The processes by name: `up`, the Masters and the workers."""

    def __init__(self, service: Service, second: _SecondMaster) -> None:
        self.service = service
        self._second = second
        self.seats = {
            "master-0": Seat("master-0", service.port, service.link_port),
            "master-1": Seat("master-1", second.port, second.link_port),
        }

    def pids(self) -> dict[str, int]:
        """The processes that live now."""
        found = {"up": self.service.process.pid}
        if alive(self._second.pid):
            found["master-1"] = self._second.pid
        for pid in self.service.children():
            name = _name_of(pid)
            if name:
                found[name] = pid
        return found

    def started(self) -> dict[int, str]:
        """Every process that was ever started, by pid."""
        lives = re.findall(r"((?:decode|prefill)-\d|master) starts: pid (\d+)", self.service.log)
        return {int(pid): name.replace("master", "master-0") for name, pid in lives} | self._second.started

    def link_ports(self) -> set[int]:
        return {seat.link_port for seat in self.seats.values()}

    def pages(self, client: httpx.Client) -> dict[str, str]:
        """Where each Master and each registered node answers, by its name."""
        urls = {name: f"http://127.0.0.1:{seat.port}" for name, seat in self.seats.items()}
        for url in list(urls.values()):
            for node in client.get(f"{url}/readyz").json()["nodes"]:
                urls["-".join(node["node"].split("-")[-2:])] = node["status_url"]
        return urls

    def logs(self, size: int) -> str:
        """The end of what the processes have said."""
        second = self._second.log.read_text()
        return f"--- log of up\n{self.service.log[-size:]}\n--- log of master-1\n{second[-size // 4 :]}"

    async def wait_healed(self) -> float:
        """Seconds until all processes are there and all nodes are registered with both Masters."""
        return await self._wait(self._unhealed, HEAL_TIMEOUT, "not healed")

    async def wait_quiet(self) -> float:
        """Seconds until nothing is in use anywhere."""
        return await self._wait(self._in_use, QUIET_TIMEOUT, "still in use")

    async def wait_answers(self, seat: Seat) -> None:
        """Until the Master accepts requests."""

        def unanswered(client: httpx.Client) -> str:
            return "" if client.get(f"http://127.0.0.1:{seat.port}/livez").status_code == 200 else "no"

        await self._wait(unanswered, HEAL_TIMEOUT, f"{seat.name} is not back")

    async def keep_second_master(self) -> None:
        """Start it again whenever it has ended, a moment later."""
        while True:
            await self._second.wait()
            await trio.sleep(random.uniform(0.1, 1.0))
            self._second.start()

    async def _wait(self, missing, timeout: float, message: str) -> float:
        began, last = trio.current_time(), ""
        with trio.move_on_after(timeout):
            while True:
                last = await trio.to_thread.run_sync(_ask_once, missing, abandon_on_cancel=True)
                if not last:
                    return trio.current_time() - began
                await trio.sleep(_LOOK)
        raise AssertionError(f"{message} after {timeout:g} s: {last}")

    def _unhealed(self, client: httpx.Client) -> str:
        absent = {*WORKERS, *MASTERS} - self.pids().keys()
        if absent:
            return f"no process {sorted(absent)}"
        lives = []
        for seat in self.seats.values():
            answer = client.get(f"http://127.0.0.1:{seat.port}/readyz")
            nodes = answer.json()["nodes"]
            if answer.status_code != 200 or len(nodes) != len(WORKERS):
                return f"{seat.name}: {answer.text}"
            lives.append({node["incarnation"]: node["status_url"] for node in nodes})
        if lives[0] != lives[1]:
            return f"the Masters see different nodes: {lives}"
        reasons = [client.get(f"{url}/readyz").json()["reasons"] for url in lives[0].values()]
        return "" if not any(reasons) else f"{reasons}"

    def _in_use(self, client: httpx.Client) -> str:
        used: dict[str, float] = {}
        pages = self.pages(client)
        for process, url in pages.items():
            values = series(client, url)
            if process in MASTERS:
                used[f"{process} requests"] = len(client.get(f"{url}/debug/tree").json()["requests"])
                names = [name for name in values if name.startswith("pdserve_requests_in_flight")]
            else:
                names = list(OF_REQUESTS)
            used |= {f"{process} {name}": values[name] for name in names}
        absent = {*WORKERS, *MASTERS} - pages.keys()
        left = {name: value for name, value in used.items() if value}
        return f"{left}, absent {absent}" if left or absent else ""


def series(client: httpx.Client, url: str) -> dict[str, float]:
    """All series of a process by `name{labels}`."""
    lines = [line for line in client.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def _ask_once(missing) -> str:
    """With connections of its own, closed again: they would count as file descriptors of the processes."""
    with httpx.Client(timeout=5, trust_env=False) as client:
        try:
            return missing(client)
        except (httpx.TransportError, ValueError, KeyError) as error:
            return repr(error)


def _name_of(pid: int) -> str:
    """`decode-0`, as `up` has named it; empty for a process that has only just begun."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if not alive(pid) or "up" in words[:4]:
        return ""
    if "master" in words[:4]:
        return "master-0"
    match = re.search(r"--node-id=\S*-((?:decode|prefill)-\d)(?:\0|$)", "\0".join(words))
    return match[1] if match else ""


class _SecondMaster:
    """`python -m pdserve master` with a place of its own."""

    def __init__(self, log: Path, flags: tuple[str, ...], env: Mapping[str, str]) -> None:
        self.log = log
        self.port, self.link_port = free_ports(2)
        ports = ("--port", str(self.port), "--link-port", str(self.link_port))
        self._words = [sys.executable, "-m", "pdserve", "master", *ports, *flags]
        self._env = env
        self.started: dict[int, str] = {}

    def start(self) -> None:
        with self.log.open("a") as out:
            self._process = subprocess.Popen(self._words, stdout=out, stderr=out, env=self._env)
        self.started[self.pid] = "master-1"

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> None:
        await wait_end(self.pid)
        self._process.wait()

    def end(self) -> None:
        self._process.kill()
        self._process.wait(_EXIT_TIMEOUT)


async def wait_end(pid: int) -> None:
    """Until the process has ended, collected or not. Raises ProcessLookupError when it was gone before."""
    pidfd = os.pidfd_open(pid)
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)


@asynccontextmanager
async def open_fleet(
    directory: Path, *, master_flags: tuple[str, ...], up_flags: tuple[str, ...], env: Mapping[str, str]
) -> AsyncIterator[Fleet]:
    """A healed fleet; `up` gets both kinds of flags. Leaving it, `up` must end cleanly and leave nothing behind."""
    second = _SecondMaster(directory / "master-1.log", master_flags, env)
    second.start()
    try:
        masters = f"ws://127.0.0.1:{second.link_port}"
        nodes = ("--prefill", "2", "--decode", "2", "--masters", masters)
        with Service(directory / "up.log", *nodes, *master_flags, *up_flags, env=env) as service:
            fleet = Fleet(service, second)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fleet.keep_second_master)
                await fleet.wait_healed()
                yield fleet
                nursery.cancel_scope.cancel()
    finally:
        second.end()
