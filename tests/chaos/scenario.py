"""Before, storm, after: the course of a chaos test, and everything that must hold at its end."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import attrs
import trio

from chaos.cpu import LeftTime
from chaos.ledger import Ledger
from chaos.storm import SIGNALS, Storm, plan

if TYPE_CHECKING:
    from chaos.fleet import Fleet
    from chaos.load import Load

LEAST_THROUGHPUT = 0.85
"""Of what it was before."""
_LOG_TAIL = 20_000


@attrs.frozen
class Course:
    """How long everything takes."""

    seed: str
    rounds: int
    gap: float
    """Seconds between two events, on average."""
    window: float
    """Seconds of one throughput window."""
    settle: float
    """Seconds of load without events after a storm, so that all peers have met again."""
    patience: float
    """Seconds of standing still after which a process counts as lost."""
    windows: int = 5
    all_cpus: bool = False
    """The load takes all that the machine has: what other programs take is not counted in the windows."""


class Scenario:
    """Runs a course over a fleet under a load."""

    def __init__(self, course: Course, fleet: Fleet, load: Load) -> None:
        self._course = course
        self._fleet = fleet
        self._load = load
        self._storm = Storm(fleet)
        self._ledger = Ledger(course.patience)

    async def run(self) -> None:
        """Raises AssertionError; what it takes to understand that is printed, and so are the figures of a success."""
        print(f"\nseed {self._course.seed} (again with --seed {self._course.seed})")
        try:
            await self._run()
        except BaseException:
            print("\n".join(["--- events", *self._storm.notes, *self._figures(), self._fleet.logs(_LOG_TAIL)]))
            raise

    async def _run(self) -> None:
        course, load = self._course, self._load
        async with load.running():
            await trio.sleep(course.settle)
            before = await self._throughput()
        await self._rest("before")
        quiet_ends = load.ends.copy()
        assert quiet_ends.keys() <= {"complete", "left"}, f"without any event: {quiet_ends}"
        for number, events in enumerate(plan(course.seed, course.rounds, course.gap)):
            async with load.running():
                await self._storm.rage(events)
                healed = await self._fleet.wait_healed()
                self._storm.note(f"healed after {healed:.1f} s")
                await trio.sleep(course.settle)
            await self._rest(f"round {number}")
        self._load.ends.subtract(quiet_ends)
        print("\n".join(self._figures()))
        async with load.running():
            await trio.sleep(course.settle)
            after = await self._throughput()
        await self._rest("after")
        share = median(after) / median(before)
        print(f"tokens/s before: {_rounded(before)}, after: {_rounded(after)}; {share:.1%} of the median before")
        assert not (leaks := self._ledger.leaks(self._storm.struck)), leaks
        assert share >= LEAST_THROUGHPUT

    async def _throughput(self) -> list[float]:
        clock = LeftTime(self._fleet.pids().values()) if self._course.all_cpus else trio.current_time
        return await self._load.windows(self._course.windows, self._course.window, clock)

    async def _rest(self, when: str) -> None:
        """No load: nothing is in use, nothing wrong has been seen, every process is one that should live."""
        quiet = await self._fleet.wait_quiet()
        self._storm.note(f"{when}: quiet after {quiet:.1f} s, slowest request {self._load.slowest:.1f} s")
        assert not self._load.violations, "\n".join(self._load.violations[:5])
        pids = self._fleet.pids()
        told = {struck.pid for struck in self._storm.struck if struck.event.kind in SIGNALS}
        gone = self._fleet.started().keys() - set(pids.values()) - told
        assert not gone, f"processes ended that nobody had told to: {gone}"
        await self._ledger.take(pids)

    def _figures(self) -> list[str]:
        ends = ", ".join(f"{count} {end}" for end, count in self._load.ends.most_common())
        return [
            f"{len(self._storm.struck)} events; requests: {ends}; slowest {self._load.slowest:.1f} s",
            *self._ledger.table(self._storm.struck),
        ]


def _rounded(rates: list[float]) -> list[float]:
    return [round(rate, 1) for rate in rates]
