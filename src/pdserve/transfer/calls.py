"""How the owner calls its agent: in batches, serially, each call under a deadline. NIXL is not thread-safe."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

from pdserve.errors import FatalError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


@attrs.frozen
class Call:
    """`fn(*args)`, then `then(its value, or the TransferError it raised)` back in the owner's task."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    then: Callable[[Any], None]


class Calls(Protocol):
    """One batch at a time. A call that raises anything but TransferError makes the whole batch raise FatalError."""

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Make the calls in order. Raises FatalError when one hangs or breaks. A checkpoint even when empty."""
        ...

    async def close(self, final: Callable[[], None]) -> bool:
        """Make one last call, bounded in time, after the batch in progress. False if it did not get done."""
        ...


def _perform(call: Call) -> Any:  # noqa: ANN401
    try:
        return call.fn(*call.args)
    except TransferError as error:
        return error
    except Exception as error:
        raise FatalError(f"NIXL call {call.name} failed: {error!r}") from error


class InlineCalls:
    """In the owner's own task: for an agent that never blocks."""

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [_perform(call) for call in calls]

    async def close(self, final: Callable[[], None]) -> bool:
        final()
        return True


class _Batch:
    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.current = ("queued", time.monotonic())
        """Name of the call in progress and since when; written by the thread."""
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.done = trio.Event()
        self.token = trio.lowlevel.current_trio_token()

    def perform(self) -> None:
        try:
            for call in self.calls:
                self.current = (call.name, time.monotonic())
                self.results.append(_perform(call))
        except BaseException as error:
            self.error = error
        with contextlib.suppress(trio.RunFinishedError):  # then nobody is left to be told
            self.token.run_sync_soon(self.done.set)


class ThreadCalls:
    """On one dedicated thread, so that a post that copies synchronously never stops the event loop.

    A daemon thread: a hung call must not keep the process from exiting. At most one batch and the last call are queued.
    """

    def __init__(self, timeout: float, *, exit_grace: float = 2.0) -> None:
        """`timeout`: seconds after which a call counts as hung; `exit_grace`: the bound of `close`."""
        self._timeout = timeout
        self._exit_grace = exit_grace
        self._hung = False
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        if not calls:
            await trio.lowlevel.checkpoint()
            return []
        batch = self._put(calls)
        while not batch.done.is_set():
            name, since = batch.current
            left = since + self._timeout - time.monotonic()
            if left <= 0:
                self._hung = True
                raise FatalError(f"NIXL call {name} hung for {self._timeout:g} s")
            with trio.move_on_after(left):
                await batch.done.wait()
        if batch.error is not None:
            raise batch.error
        return batch.results

    async def close(self, final: Callable[[], None]) -> bool:
        if self._hung:
            return False
        batch = self._put([Call("close", final, (), lambda _: None)])
        self._batches.put(None)
        with trio.move_on_after(self._exit_grace, shield=True):
            await batch.done.wait()
        if batch.error is not None:
            logger.error("the transfer agent was not closed cleanly: %s", batch.error)
        return batch.done.is_set() and batch.error is None

    def _put(self, calls: Sequence[Call]) -> _Batch:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="pdserve-nixl", daemon=True)
            self._thread.start()
        batch = _Batch(calls)
        self._batches.put(batch)
        return batch

    def _serve(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.perform()
