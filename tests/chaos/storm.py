"""What is done to the processes: drawn from a seed, carried out at its moments, and written down."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import trio

from chaos.fleet import NAMES
from chaos.sockets import connections, shut_down

if TYPE_CHECKING:
    from chaos.fleet import Fleet

ROLES = tuple(NAMES)
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}
CLOSED_SOCKET = "closed socket"
KINDS = (*SIGNALS, "SIGSTOP", CLOSED_SOCKET)
_LINK = "link"
_TRANSFERS = "transfers"
_STOP_SECONDS = (0.2, 4.0)
"""How long a process is stopped: too short to be noticed, up to well over what the heartbeat allows."""
_FIND_TIMEOUT = 30.0
_LEAVE_TIMEOUT = 30.0
"""Seconds that a process may take to end after a signal: its drain, and what a busy machine adds."""


@attrs.frozen
class Event:
    """One thing that happens to one process."""

    at: float
    """Seconds from the begin of its round."""
    kind: str
    role: str
    which: int
    """Of the two processes of the role."""
    seconds: float
    """How long a stop lasts."""


def plan(seed: str, rounds: int, gap: float) -> list[list[Event]]:
    """Rounds of one event of every kind on every role, each round in an order, at moments and on processes of its own.

    `gap`: seconds between events on average. From the fourth round in ten on, one process of each role gets no signal
    that ends it: what it keeps of all the peers that it loses can then be seen.
    """
    random_ = random.Random(f"{seed} storm")
    spared = {role: random_.randrange(2) for role in ROLES}
    planned = []
    for number in range(rounds):
        events = []
        kinds = [(kind, role) for kind in KINDS for role in ROLES]
        random_.shuffle(kinds)
        at = 0.0
        for kind, role in kinds:
            at += random_.uniform(0, 2 * gap)
            which = random_.randrange(2)
            if kind in SIGNALS and number >= 0.3 * rounds:
                which = 1 - spared[role]
            events.append(Event(at, kind, role, which, random_.uniform(*_STOP_SECONDS)))
        planned.append(events)
    return planned


@attrs.frozen
class Struck:
    """An event that has taken place."""

    time: float
    event: Event
    name: str
    pid: int
    transfers: bool = False
    """What was closed is a connection of KV transfers: both ends remove their peer."""


class Storm:
    """Carries events out on a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._began = trio.current_time()
        self.struck: list[Struck] = []
        self.notes: list[str] = []
        """What has happened, with times, to be read when something is wrong."""

    def note(self, text: str) -> None:
        self.notes.append(f"{trio.current_time() - self._began:8.2f} {text}")

    async def rage(self, events: list[Event]) -> None:
        """One round. Returns when all has been done: what was stopped goes on, what had to end has ended."""
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for event in events:
                await trio.sleep_until(began + event.at)
                await nursery.start(self._strike, event)

    async def _strike(self, event: Event, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started: the process has been struck."""
        name, pid, pidfd, what = await self._hit(event)
        # No other task has run since the blow: what clients see of it from here on is excused by what is noted here.
        try:
            self.struck.append(Struck(trio.current_time(), event, name, pid, transfers=what == _TRANSFERS))
            self.note(f"{event.kind:13} {name} (pid {pid}) {what}")
            task_status.started()
            if event.kind == "SIGSTOP":
                await self._go_on(pidfd, event.seconds)
            elif event.kind in SIGNALS and event.role == "master":
                seat = self._fleet.seats[name]
                with seat.outage():
                    await self._end(pidfd, pid, event.kind)
                    await self._fleet.wait_answers(seat)
                self.note(f"              {name} is back")
            elif event.kind in SIGNALS:
                await self._end(pidfd, pid, event.kind)
        finally:
            os.close(pidfd)

    async def _hit(self, event: Event) -> tuple[str, int, int, str]:
        """Name, pid and pidfd of the process that was struck, and with what.

        A signal that ends it waits for the wanted process; anything else takes the other of the role if that is there.
        """
        wanted, other = NAMES[event.role][event.which], NAMES[event.role][1 - event.which]
        names = (wanted,) if event.kind in SIGNALS else (wanted, other)
        with trio.move_on_after(_FIND_TIMEOUT):
            while True:
                pids = self._fleet.pids()
                for name in (name for name in names if name in pids):
                    with suppress(OSError):  # the process, or its socket, has gone in this moment
                        pidfd = os.pidfd_open(pids[name])
                        try:
                            if what := self._blow(event, name, pids, pidfd):
                                return name, pids[name], pidfd, what
                        except BaseException:
                            os.close(pidfd)
                            raise
                        os.close(pidfd)
                await trio.sleep(0.02)
        raise AssertionError(f"no process for {event} in {_FIND_TIMEOUT:g} s; there are {self._fleet.pids()}")

    def _blow(self, event: Event, name: str, pids: dict[str, int], pidfd: int) -> str:
        """What was done; empty if there is nothing to strike. Raises OSError when it has just gone."""
        if event.kind != CLOSED_SOCKET:
            signal.pidfd_send_signal(pidfd, SIGNALS.get(event.kind, signal.SIGSTOP))
            return f"for {event.seconds:.1f} s" if event.kind == "SIGSTOP" else "sent"
        sockets = self._sockets(name, pids)
        if not sockets:
            return ""
        fd, what = sockets[int(event.seconds * 1000) % len(sockets)]
        shut_down(pidfd, fd)
        return what

    async def _go_on(self, pidfd: int, seconds: float) -> None:
        try:
            await trio.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):  # another event has ended it
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    async def _end(self, pidfd: int, pid: int, kind: str) -> None:
        began = trio.current_time()
        with trio.move_on_after(_LEAVE_TIMEOUT) as scope:
            await trio.lowlevel.wait_readable(pidfd)
        assert not scope.cancelled_caught, f"process {pid} has not left {_LEAVE_TIMEOUT:g} s after {kind}"
        self.note(f"              pid {pid} ended {trio.current_time() - began:.2f} s after {kind}")

    def _sockets(self, name: str, pids: dict[str, int]) -> list[tuple[int, str]]:
        """The file descriptors of its node links, and where transfers go over TCP of those, too."""
        seat = self._fleet.seats.get(name)
        mine = connections(pids[name])
        if seat is not None:
            return [(one.fd, _LINK) for one in mine if one.local == seat.link_port]
        links = self._fleet.link_ports()
        workers = [other for other in (*NAMES["prefill"], *NAMES["decode"]) if other != name and other in pids]
        theirs = {one.local for other in workers for one in connections(pids[other])}
        return [(one.fd, _LINK) for one in mine if one.remote in links] + [
            (one.fd, _TRANSFERS) for one in mine if one.remote in theirs
        ]
