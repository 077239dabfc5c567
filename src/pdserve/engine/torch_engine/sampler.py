"""From a step's logits to tokens: greedy for the whole batch on the device, all else through the shared pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine.base import Sampled
from pdserve.engine.sampling import sample_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pdserve.engine.base import Sample


def sample_rows(logits: torch.Tensor, rows: Sequence[Sequence[Sample]]) -> list[tuple[Sampled, ...]]:
    """Draw the samples of each row of float32 logits [len(rows), vocab]."""
    best = logits.argmax(-1).tolist()
    slow = [i for i, samples in enumerate(rows) if not all(map(_is_plain_greedy, samples))]
    on_host = dict(zip(slow, logits[slow].cpu().numpy(), strict=True)) if slow else {}
    return [
        tuple(Sampled(best[i]) if _is_plain_greedy(sample) else sample_from(on_host[i], sample) for sample in samples)
        for i, samples in enumerate(rows)
    ]


def _is_plain_greedy(sample: Sample) -> bool:
    params = sample.params
    return (
        params.temperature <= 0.0
        and params.logprobs is None
        and not sample.banned
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
    )
