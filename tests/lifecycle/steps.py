"""A fault at every step: one request through HTTP app, Master, Prefill and Decode, and a failure at its k-th task step.

Everything is deterministic: virtual time, Trio's scheduler seeded, engine and transfers in the same thread. A run is
named by (fault, n, nodes, seed, k), and the same name replays the same order of steps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from lifecycle.replay import replay
from lifecycle.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from lifecycle.client import Client

PROMPT = tuple((i * 7) % 90 + 33 for i in range(37))
TOKENS = 12
LOSSES = (
    "link of prefill lost",
    "link of decode lost",
    "link of prefill silent",
    "link of decode silent",
    "prefill replaced",
    "decode replaced",
    "engine of prefill raises",
    "engine of decode raises",
)
"""Of a node."""
FAULTS = ("client leaves", "transfer fails", *LOSSES)


@attrs.frozen
class Run:
    """`k` None: nothing fails, and the steps are counted."""

    fault: str
    n: int
    nodes: int
    """How many of each role."""
    seed: int
    k: int | None


class Steps(trio.abc.Instrument):
    """Counts task steps while it is armed, and acts at the k-th."""

    def __init__(self, k: int | None) -> None:
        self.count = 0
        self._k = k
        self._armed = False
        self._act: Callable[[], None] | None = None

    def arm(self, act: Callable[[], None]) -> None:
        self._armed, self._act = True, act

    def disarm(self) -> None:
        self._armed = False

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._armed:
            return
        self.count += 1
        if self.count == self._k and self._act is not None:
            act, self._act = self._act, None
            act()


def act(run: Run, world: World, client: Client) -> None:
    """What fails, on the node that serves the request once that is known."""
    if run.fault == "client leaves":
        client.gone.set()
        return
    letter = "p" if "prefill" in run.fault else "d"
    serving = [name for request in world.master.coordinator.snapshot() for name in request["nodes"]]
    victim = next((name for name in serving if name.startswith(letter)), f"{letter}0")
    world.strike("transfer fails" if run.fault == "transfer fails" else run.fault.rpartition(" ")[2], victim)


async def serve_one(run: Run, steps: Steps) -> str:
    """One request with its fault, then whether everything is as it was. Returns the outcome."""
    async with trio.open_nursery() as nursery:
        world = World(nursery, run.nodes)
        await world.start_all()
        client = world.client(PROMPT, TOKENS, run.n)
        steps.arm(partial(act, run, world, client))
        with trio.fail_after(60):
            await client.run()
        steps.disarm()
        outcome = client.outcome()
        if run.fault in LOSSES and run.nodes > 1 and not client.began:
            assert outcome == "complete", f"{outcome}, before any output and with other nodes there"
        await trio.sleep(10 if run.fault.endswith("silent") else 2)  # silence takes three heartbeats to be noticed
        world.forgive()
        await world.settled(5.0)
        last = world.client(PROMPT, TOKENS, run.n)
        with trio.fail_after(60):
            await last.run()
        assert last.outcome() == "complete", last.data
        await world.quiet(1.0)
        nursery.cancel_scope.cancel()
    return outcome


def play(run: Run) -> tuple[str, int]:
    """The outcome of a run, and how many steps it had. Raises what is wrong, with the run's name."""
    steps = Steps(run.k)
    return replay(run.seed, serve_one, run, steps, name=run, instruments=[steps]), steps.count
