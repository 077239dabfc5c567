"""Choosing a token: the random numbers that all engines share, and the reference pipeline on numpy.

Order: banned ids, repetition penalty, presence and frequency penalties, temperature, top_k, top_p, draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdserve.engine.base import Sampled
from pdserve.wire.messages import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pdserve.engine.base import Sample
    from pdserve.wire.messages import SamplingParams

    Floats = npt.NDArray[np.float64]
    Ids = npt.NDArray[np.intp]

MASK64 = (1 << 64) - 1
_TOP_P_FIRST_TRY = 256


def mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection on 64 bits in which every bit matters."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) for one output position: counter-based, so the same on P, on D and after recovery."""
    bits = mix64(mix64(mix64(seed & MASK64) ^ (choice & MASK64)) ^ (position & MASK64))
    return float(bits >> 11) * 2.0**-53


def sample_from(logits: npt.NDArray[np.float32] | Floats, sample: Sample) -> Sampled:
    """Draw a token from the logits of one position, shape [vocabulary]; `logits` is not changed.

    Equal logits are ordered by id, lowest first. If every id is banned, the ban is void.
    Raises FloatingPointError when a logit is NaN.
    """
    params = sample.params
    scores = logits
    if sample.banned or _has_penalties(params):
        scores = _penalised(logits.astype(np.float64), sample)
        if scores.max() == -np.inf:
            scores = logits
    if params.temperature <= 0.0:
        token = int(scores.argmax())
        if np.isnan(scores[token]):
            raise FloatingPointError("the logits are not finite")
    else:
        token = _draw(scores.astype(np.float64), params, uniform(params.seed, sample.choice, sample.position))
    if params.logprobs is None:
        return Sampled(token)
    return Sampled(token, _logprob(logits.astype(np.float64), token, params.logprobs))


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _known(ids: Sequence[int], vocabulary: int) -> tuple[Ids, Ids]:
    """Distinct ids that are in the vocabulary, and how often each occurs. Clients may name ids that do not exist."""
    distinct, counts = np.unique(np.asarray(ids, dtype=np.int64), return_counts=True)
    inside = (distinct >= 0) & (distinct < vocabulary)
    return distinct[inside], counts[inside]


def _penalised(scores: Floats, sample: Sample) -> Floats:
    params = sample.params
    if params.repetition_penalty != 1.0:
        seen, _ = _known(sample.history, len(scores))
        factor = params.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        written, counts = _known(sample.history[sample.prompt_len :], len(scores))
        scores[written] -= params.presence_penalty + params.frequency_penalty * counts
    banned, _ = _known(sample.banned, len(scores))
    scores[banned] = -np.inf
    return scores


def _best(values: Floats, k: int) -> Ids:
    """Indices of the k largest, largest first, the lowest index first among equals: the same on every machine."""
    if k < len(values):
        candidates = np.flatnonzero(values >= np.partition(values, len(values) - k)[len(values) - k])
    else:
        candidates = np.arange(len(values))
    return candidates[np.argsort(-values[candidates], kind="stable")][:k]


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Indices of the smallest set of largest weights that has `top_p` of the sum; at least one."""
    goal = top_p * float(weights.sum())
    k = min(_TOP_P_FIRST_TRY, len(weights))
    while True:
        best = _best(weights, k)
        reached = np.cumsum(weights[best])
        if reached[-1] >= goal or k == len(weights):
            return best[: int(np.searchsorted(reached, goal)) + 1]
        k = min(8 * k, len(weights))


def _draw(scores: Floats, params: SamplingParams, u: float) -> int:
    peak = scores.max()
    if np.isnan(peak):
        raise FloatingPointError("the logits are not finite")
    ids: Ids | None = None
    if 0 < params.top_k < len(scores):
        ids = np.sort(_best(scores, params.top_k))
        scores = scores[ids]
    with np.errstate(over="ignore"):
        weights = np.exp((scores - peak) / params.temperature)
    if params.top_p < 1.0:
        kept = np.sort(_nucleus(weights, params.top_p))
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    # u < 1 and the sum is at least 1, so the search never ends past the last token that is possible.
    # The inverse CDF runs in id order: noise in the logits then moves borders a little, but never swaps two tokens.
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return index if ids is None else int(ids[index])


def _logprob(logits: Floats, token: int, k: int) -> TokenLogprob:
    """Of the raw distribution: before penalties, bans and temperature."""
    peak = logits.max()
    logprobs = logits - (peak + np.log(np.exp(logits - peak).sum()))
    top = tuple((int(i), float(logprobs[i])) for i in _best(logprobs, k)) if k > 0 else ()
    return TokenLogprob(token, float(logprobs[token]), top)
