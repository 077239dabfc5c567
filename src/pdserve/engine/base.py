"""The contract between the scheduler, an engine and the worker.

An engine is synchronous and owns the KV memory. The scheduler (a pure state machine, shared by all engines) decides
*what* a step computes; the engine only runs it. `worker/engine_loop.py` calls `step` in the engine's own thread, or,
for the simulator, sleeps for `StepResult.duration`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.wire.messages import KvLayout, ModelCard, SamplingParams, TokenLogprob


@attrs.frozen
class Sample:
    """Draw one token from the last logits of a work item.

    A pure function of its fields: history = prompt + output ids so far, so nothing about sampling lives in the engine.
    """

    params: SamplingParams
    history: Sequence[int]
    prompt_len: int
    choice: int = 0
    banned: tuple[int, ...] = ()
    """Ids that must not be drawn (EOS and stop ids while below min_tokens)."""

    @property
    def position(self) -> int:
        """Output position of the token to draw, from 0."""
        return len(self.history) - self.prompt_len


@attrs.frozen
class Work:
    """Compute KV for `tokens` at positions start .. start + len(tokens) - 1 of one sequence."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    """The sequence's page table: page i holds positions i * page_size .. (i + 1) * page_size - 1."""
    samples: tuple[Sample, ...] = ()
    """Empty for a prefill chunk that is not the last."""


@attrs.frozen
class StepPlan:
    work: tuple[Work, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """(source page, destination page) copies to do before the work."""


@attrs.frozen
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None


@attrs.frozen
class StepResult:
    tokens: tuple[tuple[Sampled, ...], ...]
    """Per work item, per sample."""
    duration: float = 0.0
    """Seconds that the bridge has to let pass (simulator); 0 where the step itself took the time."""


@attrs.frozen
class KvMemory:
    """The whole page pool as one contiguous range: page i lies at address + i * page_bytes."""

    address: int
    nbytes: int
    page_bytes: int
    device: str
    """`cpu` or `cuda:N`."""
    owner: Any
    """The tensor or array that keeps the memory alive."""


class Engine(Protocol):
    """One model in one process. Every method but the properties runs on the engine's one thread."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def memory(self) -> KvMemory: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def threaded(self) -> bool:
        """True: steps take real time on the CPU or GPU and need the engine thread. False: simulated durations."""
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Run one plan. Raises on failure; the engine is then unusable and the process exits."""
        ...

    def close(self) -> None: ...
