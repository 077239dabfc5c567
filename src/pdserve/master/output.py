"""What the HTTP layer iterates over: the deltas of one request, checked for contiguity."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from pdserve.errors import RequestError, WorkerFailedError

if TYPE_CHECKING:
    from pdserve.wire.messages import Delta


class GenerationOutput:
    """Implements `service.Generation`. Filled by the coordinator, bounded by max_tokens; read by one task."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self._deltas: deque[Delta] = deque()
        self._next_index = 0
        self._error: RequestError | None = None
        self._finished = False
        self._arrived = trio.Event()

    @property
    def started(self) -> bool:
        """Whether any output exists: from then on a failure is an error event, never another attempt."""
        return self._next_index > 0

    def put(self, delta: Delta) -> None:
        """Raises WorkerFailedError when the delta does not continue the output: a gap or a duplicate."""
        if delta.start_index != self._next_index:
            raise WorkerFailedError(f"output jumped from token {self._next_index} to {delta.start_index}")
        self._next_index += len(delta.token_ids)
        self._finished = delta.finish is not None
        self._deltas.append(delta)
        self._arrived.set()

    def fail(self, error: RequestError) -> None:
        """End with an error, after what has been put. A finished output stays finished."""
        if not self._finished and self._error is None:
            self._error = error
            self._arrived.set()

    def __aiter__(self) -> GenerationOutput:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            self._arrived = trio.Event()
            await self._arrived.wait()
        return self._deltas.popleft()
