"""What an endpoint makes of a generation's deltas, and the counts that go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

if TYPE_CHECKING:
    from pdserve.master.service import Generation
    from pdserve.telemetry.metrics import MasterMetrics
    from pdserve.wire.messages import Delta, SamplingParams


@attrs.define
class Usage:
    """Token counts of one request so far."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


class Reply(Protocol):
    """The shape of one response. Either `event`… and `tail`, or `add`… and `document` are used."""

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


class Meter:
    """Counts one generation as its deltas come."""

    def __init__(self, metrics: MasterMetrics, endpoint: str, accepted_at: float) -> None:
        self.usage = Usage()
        self.finished = False
        """The terminal delta has come."""
        self._metrics = metrics
        self._endpoint = endpoint
        self._accepted_at = accepted_at
        self._last: float | None = None

    def count(self, generation: Generation, delta: Delta) -> None:
        now = trio.current_time()
        tokens = len(delta.token_ids)
        if self._last is None:
            self.usage.prompt = generation.prompt_tokens
            self.usage.cached = generation.cached_tokens
            self._metrics.first_delta(
                self._endpoint,
                now - self._accepted_at,
                prompt_tokens=self.usage.prompt,
                cached_tokens=self.usage.cached,
            )
            self._last = now
        elif tokens:
            self._metrics.inter_token(now - self._last, tokens)
            self._last = now
        self._metrics.output_tokens(tokens)
        self.usage.completion += tokens
        self.finished = self.finished or delta.finish is not None


def sse(data: bytes, *, prefix: bytes = b"data: ") -> bytes:
    """One server-sent event. JSON has no raw newlines, so one line is enough."""
    return prefix + data + b"\n\n"
