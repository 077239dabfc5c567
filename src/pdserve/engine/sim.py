"""A timed engine without a model: real page memory, deterministic output, simulated durations.

What it keeps per position is a hash chained over the whole prefix, and a token depends on the hashes of all positions,
read back from the pages: a page that was lost, swapped, reused or transferred wrongly changes the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdserve.engine.base import KvMemory, Sampled, StepResult
from pdserve.engine.memory import no_room
from pdserve.engine.sampling import MASK64, mix64, uniform
from pdserve.wire.messages import KvLayout, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine.base import Sample, StepPlan, Work
    from pdserve.wire.messages import ModelCard, SamplingParams

END_TOKEN = 4
"""A sequence whose last token this is continues with EOS: how a test asks for an early end."""

_BYTES_PER_TOKEN = 8
_ALIGNMENT = 4096
_ROOT = 0x5EED
_LOGPROB = -0.1


class SimEngine:
    """Engine protocol; costs microseconds of real time per sequence and step. Raises RuntimeError after `close`.

    Raises ConfigError when there is no memory for the pages.
    """

    threaded = False

    def __init__(
        self,
        *,
        card: ModelCard,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        num_pages: int,
        page_size: int,
        prefill_tokens_per_s: float,
        decode_ms: float,
    ) -> None:
        self.card = card
        self.eos_token_ids = eos_token_ids
        self.num_pages = num_pages
        self.layout = KvLayout(page_size, page_size * _BYTES_PER_TOKEN, layers=1, kv_heads=1, head_dim=1, dtype="sim")
        self._seconds_per_token = 1.0 / prefill_tokens_per_s
        self._decode_seconds = decode_ms / 1000.0
        self._vocabulary = vocab_size
        self._choices = _choices(vocab_size, eos_token_ids)
        nbytes = num_pages * self.layout.page_bytes
        try:
            raw = np.zeros(nbytes + _ALIGNMENT, dtype=np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: more than there are addresses
            raise no_room(num_pages * page_size, nbytes, error) from error
        skip = -int(raw.ctypes.data) % _ALIGNMENT
        self._bytes = raw[skip : skip + nbytes]
        self._kv = self._bytes.view(np.uint64).reshape(num_pages, page_size)
        self._weights = np.arange(1, 2 * card.max_len + 2, 2, dtype=np.uint64)
        self._closed = False

    @property
    def memory(self) -> KvMemory:
        address, nbytes = self._bytes.ctypes.data, self._bytes.nbytes
        return KvMemory(address, nbytes, self.layout.page_bytes, device="cpu", owner=self._bytes)

    def step(self, plan: StepPlan) -> StepResult:
        if self._closed:
            raise RuntimeError("the engine is closed")
        for source, destination in plan.copies:
            self._kv[destination] = self._kv[source]
        prefill_tokens = 0
        decodes = False
        tokens = []
        for work in plan.work:
            if len(work.tokens) == 1 and work.samples and work.samples[0].position > 0:
                decodes = True
            else:
                prefill_tokens += len(work.tokens)
            self._compute(work)
            tokens.append(self._sample(work) if work.samples else ())
        duration = prefill_tokens * self._seconds_per_token + (self._decode_seconds if decodes else 0.0)
        return StepResult(tuple(tokens), duration)

    def close(self) -> None:
        self._closed = True

    def _compute(self, work: Work) -> None:
        size = self.layout.page_size
        position = work.start
        last = _ROOT
        if position:
            last = int(self._kv[work.pages[(position - 1) // size], (position - 1) % size])
        if len(work.tokens) == 1:
            self._kv[work.pages[position // size], position % size] = mix64(last ^ work.tokens[0])
            return
        chain = []
        for token in work.tokens:
            last = mix64(last ^ token)
            chain.append(last)
        positions = np.arange(position, position + len(chain))
        pages = np.asarray(work.pages)
        self._kv[pages[positions // size], positions % size] = np.array(chain, dtype=np.uint64)

    def _sample(self, work: Work) -> tuple[Sampled, ...]:
        length = work.start + len(work.tokens)
        pages = work.pages[: -(-length // self.layout.page_size)]
        hashes = self._kv[pages].reshape(-1)[:length]
        if len(self._weights) < length:
            self._weights = np.arange(1, 4 * length, 2, dtype=np.uint64)
        context = int((hashes * self._weights[:length]).sum())
        return tuple(self._sampled(context, sample) for sample in work.samples)

    def _sampled(self, context: int, sample: Sample) -> Sampled:
        token = _next(
            context,
            sample.history[-1],
            sample.params,
            sample.choice,
            sample.position,
            banned=sample.banned,
            choices=self._choices,
            eos=self.eos_token_ids,
        )
        k = sample.params.logprobs
        return Sampled(token, None if k is None else self._logprob(token, k))

    def _logprob(self, token: int, k: int) -> TokenLogprob:
        others = (i for i in range(self._vocabulary) if i != token)
        ranked = [token, *(i for i, _ in zip(others, range(k - 1), strict=False))]
        top = tuple((i, _LOGPROB - 3.0 * rank) for rank, i in enumerate(ranked)) if k else ()
        return TokenLogprob(token, _LOGPROB, top)


def expected_tokens(
    prompt: Sequence[int],
    params: SamplingParams,
    choice: int = 0,
    eos: frozenset[int] = frozenset(),
    *,
    vocab_size: int = 49152,
    max_seq_len: int | None = None,
) -> list[int]:
    """What a simulated service must answer to a prompt, EOS or stop token included; stop strings are not looked at."""
    choices = _choices(vocab_size, eos)
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    last, context, length = _ROOT, 0, 0
    output: list[int] = []
    for token in prompt:
        last, context, length = _extend(last, context, length, token)
    newest = prompt[-1]
    while True:
        banned = tuple(ends) if len(output) < params.min_tokens else ()
        newest = _next(context, newest, params, choice, len(output), banned=banned, choices=choices, eos=eos)
        output.append(newest)
        if newest in ends or len(output) >= params.max_tokens or length + 1 == max_seq_len:
            return output
        last, context, length = _extend(last, context, length, newest)


def _extend(last: int, context: int, length: int, token: int) -> tuple[int, int, int]:
    last = mix64(last ^ token)
    return last, (context + last * (2 * length + 1)) & MASK64, length + 1


def _choices(vocab_size: int, eos: frozenset[int]) -> Sequence[int]:
    """Printable ASCII as byte ids, as far as the vocabulary has them."""
    ids = range(32, min(127, vocab_size)) or range(vocab_size)
    return [i for i in ids if i not in eos] or [0]


def _next(
    context: int,
    newest: int,
    params: SamplingParams,
    choice: int,
    position: int,
    *,
    banned: tuple[int, ...],
    choices: Sequence[int],
    eos: frozenset[int],
) -> int:
    if newest == END_TOKEN and eos and min(eos) not in banned:
        return min(eos)
    bits = mix64(context)
    if params.temperature > 0.0:
        bits = mix64(bits ^ int(uniform(params.seed, choice, position) * 2.0**53))
    start = bits % len(choices)
    for i in range(len(choices)):
        token = choices[(start + i) % len(choices)]
        if token not in banned:
            return token
    return choices[start]
