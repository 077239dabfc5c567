"""Requests of every other shape: what a stream of completions does not cover."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import trio

from chaos.client import Answer, ask, document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chaos.load import Front

_DEADLINE = 60.0


def shapes(random_: random.Random) -> list[tuple[str, dict, int]]:
    """Path, body and status of one request of each shape."""
    prompt = [random_.randint(40, 120) for _ in range(random_.randint(1, 200))]
    chat = {"messages": [{"role": "user", "content": "soak" * random_.randint(1, 20)}], "ignore_eos": True}
    length = random_.randint(1, 40)
    native = {"inputs": "soak" * random_.randint(1, 20), "parameters": {"max_new_tokens": length}}
    return [
        ("/v1/completions", {"prompt": prompt, "max_tokens": length}, 200),
        ("/v1/completions", {"prompt": prompt, "max_tokens": length, "n": 2, "best_of": 3}, 200),
        ("/v1/completions", {"prompt": prompt, "max_tokens": length, "stream": True, "logprobs": 2}, 200),
        ("/v1/chat/completions", {**chat, "max_tokens": length}, 200),
        ("/v1/chat/completions", {**chat, "max_tokens": length, "stream": True, "n": 2}, 200),
        ("/generate", native, 200),
        ("/generate_stream", native, 200),
        ("/v1/completions", {"prompt": prompt, "max_tokens": -1}, 400),
        ("/v1/completions", {"prompt": prompt, "model": "another"}, 404),
    ]


async def send_others(fronts: Sequence[Front], seed: str, different: int, until: trio.Event, wrong: list[str]) -> None:
    """One request of each shape after the other, each third one left at a random moment, until the event.

    There are no more than so many `different` ones of each shape.
    """
    random_ = random.Random(seed)
    while not until.is_set():
        for path, body, status in shapes(random.Random(random_.randrange(different))):
            answer = Answer()
            leave = random_.uniform(0, 1.0) if random_.random() < 1 / 3 else _DEADLINE
            with trio.move_on_after(leave) as scope:
                await ask(random_.choice(fronts).port, body, answer, path=path)
            if scope.cancelled_caught:
                if leave == _DEADLINE:
                    wrong.append(f"no end of {path} {body} after {leave:g} s")
            elif (answer.status, answer.complete) != (status, True) or "error" in str(answer.events[-1:]):
                wrong.append(f"{path} {body}: {answer.status} {answer.broken} {document(answer)} {answer.events[-1:]}")
