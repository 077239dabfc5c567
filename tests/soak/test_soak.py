"""Memory, file descriptors, tasks and metrics series: in no process anything grows under a mixed load with cancels."""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import httpx
import pytest
import trio

from chaos.fleet import open_fleet, series
from chaos.ledger import resident
from chaos.load import Load, SimAsks
from soak.others import send_others

if TYPE_CHECKING:
    from chaos.fleet import Fleet

pytestmark = pytest.mark.soak

WARM_UP = 0.4
"""Share of the time after which nothing may grow any more. Until then caches fill, and so does the garbage: a process
that serves runs its collector only once in 20 000 objects (pdserve/collector.py), for some that is thousands of
requests, and some two MiB, apart.
"""
CLIENTS = 8
WARM_CLIENTS = 3 * CLIENTS
"""A process keeps the memory of its busiest moment: that has to be in the warm-up."""
PARTS = 4
"""Looks in the time after it."""
GROWTH = 0.02
ASKS = 300
"""Different requests to completions, and rounds of the others: what is remembered of prompts fills in the warm-up."""
MASTER = ("--model=sim-bytes",)
UP = ("--engine", "sim", "--sim-decode-ms=10", "--admission-queue-size=256")


@attrs.frozen
class Footprint:
    fds: int
    tasks: Counter[str]
    """By name."""
    series: frozenset[str]
    rss: int
    """Bytes."""

    def growth(self, now: Footprint) -> list[str]:
        """What is more than it was."""
        found = [f"fds {self.fds} to {now.fds}"] if now.fds > self.fds else []
        found += [f"tasks {dict(more)}"] if (more := now.tasks - self.tasks) else []
        found += [f"series {sorted(more)}"] if (more := now.series - self.series) else []
        found += [f"RSS {self.rss} to {now.rss}"] if now.rss > self.rss * (1 + GROWTH) else []
        return found

    def __str__(self) -> str:
        tasks, mib = self.tasks.total(), self.rss / 2**20
        return f"{self.fds} fds, {tasks} tasks, {len(self.series)} series, {mib:.2f} MiB"


async def footprints(fleet: Fleet) -> dict[str, Footprint]:
    """Of every process, when nothing runs."""
    await trio.sleep(1)  # the tasks and sockets of connections that have just been closed are cleared away
    names, tasks = await trio.to_thread.run_sync(look, fleet)
    await trio.sleep(1)  # and those of this look
    return {
        name: Footprint(open_files(pid), tasks.get(name, Counter()), names.get(name, frozenset()), resident(pid))
        for name, pid in fleet.pids().items()
    }


def look(fleet: Fleet) -> tuple[dict[str, frozenset[str]], dict[str, Counter[str]]]:
    """Series and tasks of every process."""
    with httpx.Client(timeout=10, trust_env=False) as client:
        pages = fleet.pages(client)
        names = {name: frozenset(series(client, url)) for name, url in pages.items()}
        tasks = {name: task_names(client.get(f"{url}/debug/tree").json()["tasks"]) for name, url in pages.items()}
    return names, tasks


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def task_names(tree: dict[str, Any]) -> Counter[str]:
    """How many tasks of each name there are in a tree.

    Without the timers of idle connections: that of the connection that asks is just being stopped, or is gone already.
    A connection that is left over has other tasks, and a file descriptor.
    """
    found = Counter([tree["name"]] * (not tree["name"].endswith("._idle_timeout")))
    for nursery in tree["nurseries"]:
        for child in nursery:
            found += task_names(child)
    return found


@pytest.mark.trio
async def test_nothing_grows_under_a_mixed_load_with_cancels(minutes, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "UCX_"))}
    seed = str(random.randrange(10**6))
    print(f"\nseed {seed}")
    async with open_fleet(tmp_path, master_flags=MASTER, up_flags=UP, env=env) as fleet:
        fronts = list(fleet.seats.values())
        asks = [SimAsks(seed)(random.Random(f"{seed} {number}")) for number in range(ASKS)]
        load_of = partial(
            Load, fronts, lambda draw: draw.choice(asks), deadline=60, leave_within=0.5, leaving=0.4, seed=seed
        )
        warm, load = load_of(clients=WARM_CLIENTS), load_of(clients=CLIENTS)
        wrong: list[str] = []
        begin: dict[str, Footprint] = {}
        end: dict[str, Footprint] = {}
        spent = 0.0
        for part, share in enumerate([WARM_UP] + [(1 - WARM_UP) / PARTS] * PARTS):
            over = trio.Event()
            async with trio.open_nursery() as nursery:
                for number in range(2):
                    nursery.start_soon(send_others, fronts, f"{seed} {part} {number}", ASKS, over, wrong)
                async with (load if part else warm).running():
                    await trio.sleep(60 * minutes * share)
                    over.set()
            await fleet.wait_quiet()
            end = await footprints(fleet)
            begin = begin or end
            spent += minutes * share
            print(f"after {spent:.1f} minutes, {warm.ends.total()} and {load.ends.total()} streams")
            print("\n".join(f"  {name:10} {footprint}" for name, footprint in sorted(end.items())))
        ends = warm.ends + load.ends
        print(f"streams: {dict(ends)}; slowest {max(warm.slowest, load.slowest):.1f} s")
        wrong += warm.violations + load.violations
        assert not wrong, "\n".join(wrong[:5])
        assert ends.keys() == {"complete", "left"}, ends
        growth = {name: grown for name, was in begin.items() if (grown := was.growth(end[name]))}
        assert not growth, f"{growth}\n{fleet.logs(3000)}"
