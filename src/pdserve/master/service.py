"""What the HTTP layer needs of a Master: the border between `http` and `master`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from pdserve.errors import RequestError
    from pdserve.wire.messages import Delta, ModelCard, SamplingParams


@attrs.frozen
class GenerationRequest:
    """One validated, tokenised request."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    label: str
    """The client's `X-Request-Id` or one made up; a label only, never an identity."""
    accepted_at: float
    """`trio.current_time()` of the HTTP accept: the total deadline counts from here."""
    n: int = 1
    """Choices to generate, each in a slot of its own."""


@attrs.frozen
class ChoiceFailed:
    """One of several choices has ended with an error; the others go on."""

    choice: int
    error: RequestError


class Generation(Protocol):
    """The output of one request: an async iterator of `Delta`.

    Per choice, deltas are contiguous and the last one has `finish` set, or a `ChoiceFailed` takes its place; iteration
    stops after the last choice's end. The first `__anext__` returns only once Decode has admitted the request; until
    then, and on a later failure of the whole request, it raises an `errors.RequestError`; with n = 1 every failure is.
    """

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that P took from its prefix cache. Known from the first delta on."""
        ...

    def __aiter__(self) -> Generation: ...

    async def __anext__(self) -> Delta | ChoiceFailed: ...


@attrs.frozen
class Readiness:
    ready: bool
    reasons: tuple[str, ...]
    """Why not ready, and which nodes were refused or are unmatched."""
    nodes: tuple[dict[str, Any], ...] = ()


class MasterService(Protocol):
    """A running Master. Leaving a generation's context gives everything back, however it is left."""

    @property
    def card(self) -> ModelCard:
        """The served model; `max_len` is the effective limit (the minimum over the registered nodes)."""
        ...

    @property
    def max_capacity(self) -> int:
        """Largest capacity of any registered Decode node; 0 if none."""
        ...

    def output_room(self, prompt_tokens: int, n: int) -> int:
        """How many tokens each of `n` choices can have so that the KV of all fits on one Decode node; at least 1.

        For requests that do not say how long their output may be.
        """
        ...

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]: ...

    def readiness(self) -> Readiness: ...

    def tree(self) -> dict[str, Any]:
        """JSON-able: every live task with its owner, every request with its phase and the seconds spent in it."""
        ...
