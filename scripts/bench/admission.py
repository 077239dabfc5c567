"""Saturates admission: 64 slots, 50 ms a request, 256 clients in a closed loop. See docs/performance.md.

Ends with status 1 when pool and coordinator miss their target, or when anybody is refused anywhere.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import through_http
import trio
import trio.testing
from closed_loop import closed_loop
from stand_ins import open_stand_ins
from whole_stack import open_whole_stack

from pdserve import collector
from pdserve.errors import ServerBusyError
from pdserve.master.service import GenerationRequest
from pdserve.wire.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from closed_loop import Tally

    from pdserve.master.coordinator import Coordinator

SLOTS, QUEUE, CLIENTS = 64, 192, 256
BUSY = 0.05
"""Seconds that a request takes in its slot."""
STEPS = 5
"""Where an engine decodes: in so many steps."""
LIMIT = SLOTS / BUSY
TARGET = 0.95
TRIES = 3
"""A core that others use as well is late for its timers: the neighbours are not what is measured."""
PROMPT_TOKENS = 16


def main() -> int:
    collector.relax()  # as in every process that serves
    print(
        f"{SLOTS} slots, {BUSY * 1000:g} ms a request, a queue of {QUEUE}, {CLIENTS} clients: the limit is {LIMIT:g}/s"
    )
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the run\n")

    print("Pool and coordinator, stand-ins for Prefill and Decode, 10 s:")
    passed = any(trio.run(pool_and_coordinator) for _ in range(TRIES))

    print(f"\nThe whole stack in one process, {STEPS} steps a request, 2 s of virtual time, then 5 s of real time:")
    clock = trio.testing.MockClock(autojump_threshold=0)
    passed &= trio.run(partial(whole_stack, 2.0, least_peak=SLOTS), clock=clock)
    passed &= trio.run(partial(whole_stack, 5.0, least_peak=1))

    print("\nThrough HTTP, 8 s; the processes of pdserve and the clients share the cores:")
    served, bare = through_http.measure(slots=SLOTS, queue=QUEUE, clients=CLIENTS, busy=BUSY, steps=STEPS, seconds=8.0)
    print(f"  pdserve          {_figures(served)}")
    print(f"  bare hypercorn   {_figures(bare)}")
    print(f"  ratio            {served.per_second / bare.per_second:.3f}")
    passed &= served.refused == 0

    print("\npassed" if passed else "\nFAILED")
    return 0 if passed else 1


async def pool_and_coordinator() -> bool:
    """Whether the target was reached with nobody refused, and with all slots in use and never one more."""
    async with open_stand_ins(slots=SLOTS, queue=QUEUE, busy=BUSY) as (coordinator, decode):
        tally = await saturate(coordinator, max_tokens=2, warm_up=2.0, seconds=10.0, on_start=decode.waits.clear)
        decode.pool.check_integrity()
    waits = sorted(decode.waits)
    p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    print(f"  {_figures(tally)}, peak {decode.pool.peak}, {_cores(tally)}")
    print(f"  waits for a slot: p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms")
    return tally.per_second >= TARGET * LIMIT and tally.refused == 0 and decode.pool.peak == SLOTS


async def whole_stack(seconds: float, *, least_peak: int) -> bool:
    """Whether nobody was refused, and at least `least_peak` slots and never more than all were in use."""
    began = time.monotonic()
    async with open_whole_stack(slots=SLOTS, queue=QUEUE, step=BUSY / STEPS) as (coordinator, pool):
        tally = await saturate(coordinator, max_tokens=STEPS + 1, warm_up=1.0, seconds=seconds)
    took = time.monotonic() - began
    print(f"  {_figures(tally)}, peak {pool.peak}, took {took:.0f} s")
    return tally.refused == 0 and pool.peak >= least_peak


async def saturate(
    coordinator: Coordinator,
    *,
    max_tokens: int,
    warm_up: float,
    seconds: float,
    on_start: Callable[[], None] = lambda: None,
) -> Tally:
    """Closed loop of requests, each read to its end."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompts = [tuple(range(32 + client % 64, 32 + client % 64 + PROMPT_TOKENS)) for client in range(CLIENTS)]

    async def ask(client: int) -> bool:
        request = GenerationRequest(prompts[client], params, "bench", trio.current_time())
        try:
            async with coordinator.generate(request) as output:
                async for _ in output:
                    pass
        except ServerBusyError:
            return False
        return True

    return await closed_loop(ask, clients=CLIENTS, warm_up=warm_up, seconds=seconds, on_start=on_start)


def _figures(tally: Tally) -> str:
    rate = tally.per_second
    return f"{rate:.0f} requests/s, {rate / LIMIT:.1%} of the limit, {tally.refused} refused"


def _cores(tally: Tally) -> str:
    return f"used {tally.cpu / tally.seconds:.0%} of a core and waited {tally.starved / tally.seconds:.0%} for one"


if __name__ == "__main__":
    sys.exit(main())
