"""A steady load: a closed loop of clients that check everything they get."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from chaos.client import Answer, ask
from chaos.verdict import Violation, judge
from pdserve.engine.sim import expected_tokens
from pdserve.text.bytelevel import ByteTokenizer
from pdserve.wire.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

_PAUSE = 0.2
"""Seconds that a client waits after anything but a success, as a client in production would."""
_VOCABULARY = 258
_MODEL_TOKENS = 10
_CLOSE = 0.02


class Front(Protocol):
    """A Master, as its clients know it."""

    port: int

    def was_down(self, since: float) -> bool:
        """Whether it was taken away on purpose at some moment from `since` to now."""
        ...


@attrs.frozen
class Ask:
    """One request, and what its answer has to be."""

    prompt: tuple[int, ...]
    expected: tuple[tuple[int, ...], ...]
    """The tokens of each choice."""
    temperature: float
    seed: int

    @property
    def body(self) -> dict:
        return {
            "prompt": list(self.prompt),
            "n": len(self.expected),
            "max_tokens": len(self.expected[0]),
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }


class SimAsks:
    """Random requests to the simulated engine: prompts that share beginnings, one choice or three, short and long."""

    def __init__(self, seed: str) -> None:
        random_ = random.Random(seed)
        self._beginnings = [_ids(random_, length) for length in (0, 0, 20, 60, 130, 200)]

    def __call__(self, random_: random.Random) -> Ask:
        prompt = random_.choice(self._beginnings) + _ids(random_, random_.randint(1, 60))
        n = 3 if random_.random() < 0.25 else 1
        params = SamplingParams(
            max_tokens=random_.randint(1, 60),
            temperature=random_.choice((0.0, 1.0)),
            seed=random_.randrange(2**31),
            ignore_eos=True,
        )
        eos = ByteTokenizer().eos_token_ids
        choices = (expected_tokens(prompt, params, choice, eos, vocab_size=_VOCABULARY) for choice in range(n))
        return Ask(prompt, tuple(map(tuple, choices)), params.temperature, params.seed)


class ModelAsks:
    """Short greedy requests to the embedded model, answered as in the recording of another implementation."""

    def __init__(self) -> None:
        recorded = json.loads((Path(__file__).parents[1] / "engine" / "torch_engine" / "reference.json").read_text())
        self._cases = [
            (tuple(case["ids"]), tuple(case["output"]))
            for case in recorded["prompts"]
            # Where the two best logits are close, rounding decides, and with it what else is in the batch.
            if len(case["ids"]) <= 64 and min(case["gaps"][:_MODEL_TOKENS]) > _CLOSE
        ]

    def __call__(self, random_: random.Random) -> Ask:
        prompt, output = random_.choice(self._cases)
        n = 3 if random_.random() < 0.25 else 1
        return Ask(prompt, (output[: random_.randint(2, _MODEL_TOKENS)],) * n, temperature=0.0, seed=0)


def _ids(random_: random.Random, count: int) -> tuple[int, ...]:
    return tuple(random_.randint(40, 120) for _ in range(count))


class Load:
    """`clients` clients, each with one request after the other to a Master drawn at random.

    A share of `leaving` of the requests is left by its client within `leave_within` seconds. Each has `deadline`
    seconds; over it, and whatever else `judge` refuses, goes to `violations`.
    """

    def __init__(
        self,
        fronts: Sequence[Front],
        asks: Callable[[random.Random], Ask],
        *,
        clients: int,
        deadline: float,
        leave_within: float,
        leaving: float = 0.15,
        seed: str,
    ) -> None:
        self._fronts = fronts
        self._asks = asks
        self._randoms = [random.Random(f"{seed} client {number}") for number in range(clients)]
        self._deadline = deadline
        self._leave_within = leave_within
        self._leaving = leaving
        self._stopping = False
        self.tokens = 0
        """Received so far, by all clients together."""
        self.ends: Counter[str] = Counter()
        """How the requests have ended."""
        self.slowest = 0.0
        """Seconds."""
        self.violations: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The load while the block runs; leaving it, every client ends the request that it has."""
        self._stopping = False
        async with trio.open_nursery() as nursery:
            for random_ in self._randoms:
                nursery.start_soon(self._client, random_)
            yield
            self._stopping = True

    async def windows(self, count: int, seconds: float, clock: Callable[[], float]) -> list[float]:
        """Tokens a second of the clock in each of so many windows, one after the other."""
        found = []
        for _ in range(count):
            tokens, began = self.tokens, clock()
            await trio.sleep(seconds)
            found.append((self.tokens - tokens) / (clock() - began))
        return found

    async def _client(self, random_: random.Random) -> None:
        while not self._stopping:
            end = await self._one(random_.choice(self._fronts), self._asks(random_), self._leaves(random_))
            self.ends[end] += 1
            if end not in ("complete", "left"):
                await trio.sleep(_PAUSE)

    def _leaves(self, random_: random.Random) -> float | None:
        return random_.uniform(0, self._leave_within) if random_.random() < self._leaving else None

    async def _one(self, front: Front, wanted: Ask, leave: float | None) -> str:
        answer, began = Answer(), trio.current_time()
        with trio.move_on_after(self._deadline if leave is None else leave) as scope:
            await ask(front.port, wanted.body, answer, self._count)
        seconds = trio.current_time() - began
        self.slowest = max(self.slowest, seconds)
        try:
            if scope.cancelled_caught and leave is None:
                raise Violation(f"no end after {seconds:.1f} s; status {answer.status}, {answer.events[-2:]}")
            return judge(answer, wanted.expected, left=scope.cancelled_caught, may_break=front.was_down(began))
        except Violation as violation:
            self.violations.append(f"after {seconds:.1f} s at port {front.port}, {wanted.body}: {violation}")
            return "VIOLATION"

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
