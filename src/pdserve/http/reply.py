"""What an endpoint makes of a generation's deltas, and the counts that go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

if TYPE_CHECKING:
    from pdserve.http.choices import Choices
    from pdserve.master.service import Generation
    from pdserve.telemetry.metrics import MasterMetrics
    from pdserve.wire.messages import Delta, SamplingParams


@attrs.define
class Usage:
    """Token counts of one request so far.

    `completion` is over every choice that is generated: with `best_of` over those, too, that the client never sees.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0


class Reply(Protocol):
    """The shape of one response. Either `event`… and `tail`, or `add`… and `document` are used.

    The deltas of several choices come interleaved, each choice's own in order.
    """

    def event(self, delta: Delta, usage: Usage) -> bytes:
        """Server-sent events of one delta; may be empty, as while text is held back."""
        ...

    def tail(self, usage: Usage) -> bytes:
        """What ends a stream that has finished properly."""
        ...

    def add(self, delta: Delta) -> None: ...

    def document(self, usage: Usage) -> dict[str, Any]:
        """The JSON response once every delta is added."""
        ...


@attrs.frozen
class Job:
    """A validated and tokenised request together with the shape of its response."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stream: bool
    reply: Reply
    choices: Choices


class Meter:
    """Counts one generation of `choices` choices as its deltas come."""

    def __init__(self, metrics: MasterMetrics, endpoint: str, accepted_at: float, choices: int = 1) -> None:
        self.usage = Usage()
        self._metrics = metrics
        self._endpoint = endpoint
        self._accepted_at = accepted_at
        self._choices = choices
        self._finished: set[int] = set()
        self._failed: set[int] = set()
        self._last: dict[int, float] = {}
        """When each choice's latest tokens came."""

    @property
    def begun(self) -> bool:
        """The first delta of any choice has come."""
        return bool(self._last)

    @property
    def finished(self) -> bool:
        """The terminal delta of every choice has come."""
        return len(self._finished) == self._choices

    @property
    def ended(self) -> bool:
        """Every choice has finished or failed: nothing is missing without a reason."""
        return len(self._finished | self._failed) == self._choices

    def choice_failed(self, choice: int) -> None:
        self._failed.add(choice)

    def count(self, generation: Generation, delta: Delta) -> None:
        now = trio.current_time()
        tokens = len(delta.token_ids)
        if not self.begun:
            self.usage.prompt = generation.prompt_tokens
            self.usage.cached = generation.cached_tokens
            self._metrics.first_delta(
                self._endpoint,
                now - self._accepted_at,
                prompt_tokens=self.usage.prompt,
                cached_tokens=self.usage.cached,
            )
        last = self._last.get(delta.choice)
        if last is not None and tokens:
            self._metrics.inter_token(now - last, tokens)
        if last is None or tokens:
            self._last[delta.choice] = now
        self._metrics.output_tokens(tokens)
        self.usage.completion += tokens
        if delta.finish is not None:
            self._finished.add(delta.choice)


def sse(data: bytes, *, prefix: bytes = b"data: ") -> bytes:
    """One server-sent event. JSON has no raw newlines, so one line is enough."""
    return prefix + data + b"\n\n"
