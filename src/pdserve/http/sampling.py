"""The parameters that all generating endpoints share, under OpenAI's names or LightLLM's."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequestError
from pdserve.http.choices import Choices
from pdserve.wire.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.http.fields import Fields

MAX_LOGPROBS = 20
MAX_CHOICES = 128
"""OpenAI's own limit of `n`; a Decode node with fewer slots lowers it."""
_MAX_STOP_IDS = 128
_MAX_STOP_CHARS = 1024


def output_length(
    fields: Fields, names: Sequence[str], *, prompt: str, prompt_tokens: int, max_len: int, default: int
) -> int:
    """How many tokens may be generated: the first of `names` that is given, else `default` as far as it fits.

    Raises InvalidRequestError naming `prompt` or the length when both together exceed `max_len` tokens.
    """
    room = max_len - prompt_tokens
    if room < 1:
        raise InvalidRequestError(
            f"{prompt}: has {prompt_tokens} tokens; this model takes {max_len} for prompt and output together",
            param=prompt,
        )
    asked = [(name, fields.integer(name, low=1)) for name in names]
    for name, value in asked:
        if value is not None and value > room:
            raise fields.invalid(
                name, f"{value} is too many: with {prompt_tokens} prompt tokens the limit of {max_len} leaves {room}"
            )
    chosen = next((value for _, value in asked if value is not None), None)
    return min(default, room) if chosen is None else chosen


def sampling_params(
    fields: Fields,
    *,
    max_tokens: int,
    vocab_size: int,
    logprobs: int | None,
    stop: str = "stop",
    min_tokens: str = "min_tokens",
    greedy: bool = False,
) -> SamplingParams:
    """`stop` and `min_tokens` are the endpoint's names for these. An unset seed is drawn here, once a request."""
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    temperature = fields.number("temperature", 1.0, low=0, high=2)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.integer(min_tokens, low=0, high=max_tokens) or 0,
        temperature=0.0 if greedy else temperature,
        top_p=fields.number("top_p", 1.0, low=0, high=1, above_low=True),
        top_k=max(0, fields.integer("top_k", low=-1, high=2**31 - 1) or 0),
        # The wire carries 64-bit integers.
        seed=secrets.randbits(63) if seed is None else seed & (2**63 - 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, low=0, high=1000, above_low=True),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2, high=2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2, high=2),
        stop=fields.strings(stop, most=4, longest=_MAX_STOP_CHARS),
        stop_token_ids=fields.token_ids("stop_token_ids", vocab_size=vocab_size, most=_MAX_STOP_IDS),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
    )


def read_choices(fields: Fields, *, stream: bool, capacity: int) -> Choices:
    """`n` and `best_of`, which is `n` if absent. `capacity`: the most slots of any Decode node; 0 if none is known.

    Raises InvalidRequestError naming the one that is wrong, or that no node has the slots for. A stream cannot choose
    the best: it would have to wait for the end.
    """
    n = fields.integer("n", low=1, high=MAX_CHOICES) or 1
    best_of = fields.integer("best_of", low=n, high=MAX_CHOICES) or n
    for name, value in (("n", n), ("best_of", best_of)):
        if value > capacity > 0:
            raise fields.invalid(name, f"{value} is too many: one node takes all choices, and at most {capacity}")
    if stream and best_of > n:
        raise fields.invalid("best_of", "must equal n in a stream")
    return Choices(n, best_of)
