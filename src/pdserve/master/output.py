"""What the HTTP layer iterates over: the deltas of one request, checked for contiguity choice by choice."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from pdserve.errors import RequestError, WorkerFailedError
from pdserve.master.service import ChoiceFailed

if TYPE_CHECKING:
    from pdserve.wire.messages import Delta


class GenerationOutput:
    """Implements `service.Generation`. Filled by the coordinator, bounded by n * max_tokens; read by one task."""

    def __init__(self, prompt_tokens: int, n: int = 1) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self._items: deque[Delta | ChoiceFailed] = deque()
        self._next_index = dict.fromkeys(range(n), 0)
        """Of the choices that have not ended."""
        self._error: RequestError | None = None
        self._started = False
        self._arrived = trio.Event()

    @property
    def started(self) -> bool:
        """Whether any output exists: from then on a failure is an error event, never another attempt."""
        return self._started

    def put(self, delta: Delta) -> None:
        """Raises WorkerFailedError when the delta does not continue its choice: a gap or a duplicate."""
        expected = self._next_index.get(delta.choice)
        if delta.start_index != expected:
            raise WorkerFailedError(f"output jumped from token {expected} to {delta.start_index}")
        self._next_index[delta.choice] += len(delta.token_ids)
        if delta.finish is not None:
            del self._next_index[delta.choice]
        self._add(delta)

    def fail_choice(self, choice: int, error: RequestError) -> None:
        """End one choice with an error; the others go on."""
        del self._next_index[choice]
        self._add(ChoiceFailed(choice, error))

    def fail(self, error: RequestError) -> None:
        """End with an error, after what has been put. A finished output stays finished."""
        if self._next_index and self._error is None:
            self._error = error
            self._arrived.set()

    def _add(self, item: Delta | ChoiceFailed) -> None:
        self._started = True
        self._items.append(item)
        self._arrived.set()

    def __aiter__(self) -> GenerationOutput:
        return self

    async def __anext__(self) -> Delta | ChoiceFailed:
        while not self._items:
            if self._error is not None:
                raise self._error
            if not self._next_index:
                raise StopAsyncIteration
            self._arrived = trio.Event()
            await self._arrived.wait()
        return self._items.popleft()
