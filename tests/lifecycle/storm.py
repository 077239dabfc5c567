"""Many requests and several faults at once, at moments drawn from a seed: what one fault at a time does not meet."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import trio

from lifecycle.replay import replay
from lifecycle.world import HEARTBEAT, World

if TYPE_CHECKING:
    from lifecycle.client import Client

BLOWS = ("lost", "silent", "replaced", "raises", "drains", "transfer fails")
NODES = 2
"""Of each role."""
_CLIENTS = (15, 30)
_STRIKES = (2, 6)
_SETTLE = 5 * HEARTBEAT + 10
"""Seconds after which every node has been missed, and is back."""


class Storm:
    """Draws who asks for what and when, and what happens to whom."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"storm {seed}")
        self._seconds = self._random.choice((0.2, 1.0, 3.0))
        self.master = {
            "admission_timeout": self._random.choice((0.0, 0.1, 5.0)),
            "reservation_ttl": self._random.choice((0.02, 5.0)),
            "heartbeat_interval": HEARTBEAT,
        }

    async def ask(self, world: World) -> Client:
        """One request, a third of which leave before their end; returns when it is over."""
        draw = self._random
        prompt = tuple((i * 7) % 90 + 33 for i in range(draw.choice((1, 16, 17, 40, 100))))
        client = world.client(prompt, draw.choice((1, 8, 40)), draw.choice((1, 1, 1, 3)))
        leave = draw.uniform(0, 0.4) if draw.random() < 1 / 3 else None
        await trio.sleep(draw.uniform(0, self._seconds))
        async with trio.open_nursery() as nursery:
            if leave is not None:
                nursery.start_soon(_leave, client, leave)
            with trio.fail_after(60):
                await client.run()
            nursery.cancel_scope.cancel()
        return client

    async def strike(self, world: World) -> None:
        blow, victim = self._random.choice(BLOWS), self._random.choice(world.names)
        await trio.sleep(self._random.uniform(0, self._seconds))
        world.strike(blow, victim)

    def clients(self) -> int:
        return self._random.randint(*_CLIENTS)

    def strikes(self) -> int:
        return self._random.randint(*_STRIKES)


async def weather(seed: int) -> Counter[str]:
    """A storm, then whether everything is as it was. Returns how the requests have ended."""
    storm, outcomes = Storm(seed), Counter[str]()

    async def ask() -> None:
        outcomes[(await storm.ask(world)).outcome()] += 1

    async with trio.open_nursery() as nursery:
        world = World(nursery, NODES, **storm.master)
        await world.start_all()
        async with trio.open_nursery() as raging:
            for _ in range(storm.clients()):
                raging.start_soon(ask)
            for _ in range(storm.strikes()):
                raging.start_soon(storm.strike, world)
        await trio.sleep(_SETTLE)
        world.forgive()
        await world.settled(5.0)
        assert sorted(node.node_id for node in world.registry.nodes()) == sorted(world.names), "a node is missing"
        last = world.client((65, 66), 8, 1)
        with trio.fail_after(60):
            await last.run()
        assert last.outcome() == "complete", last.data
        await world.quiet(1.0)
        nursery.cancel_scope.cancel()
    return outcomes


async def _leave(client: Client, after: float) -> None:
    await trio.sleep(after)
    client.gone.set()


def play(seed: int) -> Counter[str]:
    """How the requests of that storm have ended. Raises what is wrong, with the seed."""
    return replay(seed, weather, seed, name=f"lifecycle.storm.play({seed})")
