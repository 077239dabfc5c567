"""Clients that each ask again as soon as they have their answer."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@attrs.frozen
class Tally:
    """What `clients` got done in `seconds` after the warm-up."""

    done: int
    refused: int
    """By a full service, warm-up included."""
    seconds: float
    cpu: float
    """Seconds for which this process had a core."""
    starved: float
    """Seconds for which it could have run and had to wait for a core that others used. NaN where Linux does not say."""

    @property
    def per_second(self) -> float:
        return self.done / self.seconds


async def closed_loop(
    ask: Callable[[int], Awaitable[bool]],
    *,
    clients: int,
    warm_up: float,
    seconds: float,
    on_start: Callable[[], None] = lambda: None,
) -> Tally:
    """Let `clients` tasks run `ask(client)` over and over; False from it means refused. Its exceptions end the run.

    `on_start` is called when the measurement begins. Seconds are Trio's: virtual ones under a MockClock.
    """
    done = refused = 0

    async def client(index: int) -> None:
        nonlocal done, refused
        while True:
            if await ask(index):
                done += 1
            else:
                refused += 1
                await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        for index in range(clients):
            nursery.start_soon(client, index)
        await trio.sleep(warm_up)
        on_start()
        before, began, cpu, starved = done, trio.current_time(), time.process_time(), _starved()
        await trio.sleep(seconds)
        elapsed = trio.current_time() - began
        tally = Tally(done - before, refused, elapsed, time.process_time() - cpu, _starved() - starved)
        nursery.cancel_scope.cancel()
    return tally


def _starved() -> float:
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return math.nan
