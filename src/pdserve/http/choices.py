"""The choices of one request: how many there are, what each has generated, and which ones the client gets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from pdserve.wire.messages import Delta, TokenLogprob


@attrs.frozen
class Choices:
    """`best_of` choices are generated, the client gets `n` of them; `best_of` is at least `n`."""

    n: int = 1
    best_of: int = 1

    @property
    def ranked(self) -> bool:
        """More are generated than answered with: it takes logprobs to choose."""
        return self.best_of > self.n


class Output:
    """Everything that one choice has generated."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [one for delta in self.deltas for one in delta.logprobs]

    @property
    def mean_logprob(self) -> float:
        """Of the tokens that were chosen; minus infinity if there are none."""
        logprobs = [one.logprob for one in self.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else -math.inf


class Outputs:
    """Collects the deltas of one generation, whose choices come interleaved."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._outputs: dict[int, Output] = {}

    def add(self, delta: Delta) -> None:
        self._outputs.setdefault(delta.choice, Output()).deltas.append(delta)

    def chosen(self) -> list[Output]:
        """The `n` that the client gets, in the order of their choices.

        When ranked: those with the highest mean logprob for each output token, the highest first; of equal ones the
        earlier choice first.
        """
        outputs = [self._outputs[choice] for choice in sorted(self._outputs)]
        if self._choices.ranked:
            outputs.sort(key=lambda output: output.mean_logprob, reverse=True)
        return outputs[: self._choices.n]
