"""File descriptors and memory of every process from its first quiet moment to the last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from chaos.storm import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chaos.storm import Struck

MEMORY_GROWTH = 0.04
"""What level means: the most by which the resident memory of a process may grow from the middle of its life to the end.
In its first rounds it still grows: a Master needs some thousand requests and link losses to have seen everything.
"""
_LEAST_SAMPLES = 4
"""Of a life whose memory is judged."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SETTLE = 5
"""Looks, 0.2 s apart, of which the least counts: connections that were just closed are still being cleared away."""


@attrs.frozen
class Sample:
    time: float
    fds: int
    rss: int
    """Bytes."""


@attrs.define
class _Life:
    name: str
    samples: list[Sample] = attrs.field(factory=list)


class Ledger:
    """Samples by process life.

    `patience`: seconds after which a process that stands still is taken for lost by its peers.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._lives: dict[int, _Life] = {}

    async def take(self, pids: Mapping[str, int]) -> None:
        """To be called when nothing runs."""
        fds: dict[int, int] = {}
        for _ in range(_SETTLE):
            for pid in pids.values():
                fds[pid] = min(fds.get(pid, 10**9), len(os.listdir(f"/proc/{pid}/fd")))
            await trio.sleep(0.2)
        for name, pid in pids.items():
            sample = Sample(trio.current_time(), fds[pid], resident(pid))
            self._lives.setdefault(pid, _Life(name)).samples.append(sample)

    def leaks(self, struck: Sequence[Struck]) -> list[str]:
        """Processes with more new file descriptors than removed peers, or memory that is not level."""
        found = []
        for pid, life in self._lives.items():
            first, last = life.samples[0], life.samples[-1]
            removed = self._removed(life.name, [one for one in struck if first.time < one.time < last.time])
            if last.fds - first.fds > removed:
                found.append(f"{life.name} (pid {pid}): {first.fds} to {last.fds} fds with {removed} peers removed")
            middle = life.samples[(len(life.samples) - 1) // 2]
            if len(life.samples) >= _LEAST_SAMPLES and last.rss > middle.rss * (1 + MEMORY_GROWTH):
                found.append(f"{life.name} (pid {pid}): {_mib(middle.rss)} to {_mib(last.rss)} MiB")
        return found

    def table(self, struck: Sequence[Struck]) -> list[str]:
        """One line for each life that was seen twice or more."""
        lines = []
        for pid, life in self._lives.items():
            first, last = life.samples[0], life.samples[-1]
            if first is not last:
                removed = self._removed(life.name, [one for one in struck if first.time < one.time < last.time])
                fds = " ".join(str(sample.fds) for sample in life.samples)
                rss = " ".join(_mib(sample.rss) for sample in life.samples)
                lines.append(f"{life.name:10} pid {pid}: {removed} peers removed; fds {fds}; MiB {rss}")
        return lines

    def _removed(self, name: str, struck: Sequence[Struck]) -> int:
        """How many peers this process has removed, at least: those that ended, or stood still for too long.

        A worker's peers are the workers of the other role, a Master's are all workers; one that has stood still itself
        has lost two of them at least. `up` has none: it keeps nothing.
        """
        if name == "up":
            return 0
        removed = 0
        for one in struck:
            event = one.event
            lost = event.kind in SIGNALS or (event.kind == "SIGSTOP" and event.seconds > self._patience)
            if lost and one.name != name and event.role != "master":
                removed += not name.startswith(event.role)
            elif lost and one.name == name:
                removed += 2
            elif one.transfers and (one.name == name or not name.startswith((event.role, "master"))):
                removed += 1
        return removed


def resident(pid: int) -> int:
    """Resident memory in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
