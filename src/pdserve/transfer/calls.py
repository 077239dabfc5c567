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


def ignore(_: object) -> None:
    """For a call whose result plays no role."""


class Calls(Protocol):
    """One batch at a time. A call that raises anything but TransferError makes the whole batch raise FatalError."""

    async def run(self, calls: Sequence[Call], patience: float = 0.0) -> list[Any]:
        """Make the calls in order. Raises FatalError when one hangs or breaks. A checkpoint even when empty.

        Where calls have a thread of their own, they are repeated for up to `patience` seconds while no result is news
        (true): polling there costs a tenth of what a round of the event loop costs.
        """
        ...

    def nudge(self) -> None:
        """There is something else to do: end the patience of the batch in progress."""
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

    async def run(self, calls: Sequence[Call], patience: float = 0.0) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [_perform(call) for call in calls]

    def nudge(self) -> None:
        pass

    async def close(self, final: Callable[[], None]) -> bool:
        final()
        return True


class _Batch:
    def __init__(self, calls: Sequence[Call], patience: float) -> None:
        self.calls = calls
        self.current = ("queued", time.monotonic())
        """Name of the call in progress and since when; written by the thread."""
        self.patient_until = time.monotonic() + patience
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.done = trio.Event()
        self.token = trio.lowlevel.current_trio_token()

    def perform(self) -> bool:
        """Make the calls; True if they may be made again, since there is no news."""
        self.results = []
        try:
            for call in self.calls:
                self.current = (call.name, time.monotonic())
                self.results.append(_perform(call))
        except BaseException as error:
            self.error = error
            return False
        self.current = ("pause", time.monotonic())
        return not any(self.results) and time.monotonic() < self.patient_until

    def finish(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # then nobody is left to be told
            self.token.run_sync_soon(self.done.set)


_NUDGE = object()
_STOP = object()
_PAUSE = 0.0015
"""Seconds between repeated calls."""


class ThreadCalls:
    """On one dedicated thread, so that a post that copies synchronously never stops the event loop.

    A daemon thread: a hung call must not keep the process from exiting. At most one batch and the last call are queued.
    """

    def __init__(self, timeout: float, *, exit_grace: float = 2.0) -> None:
        """`timeout`: seconds after which a call counts as hung; `exit_grace`: the bound of `close`."""
        self._timeout = timeout
        self._exit_grace = exit_grace
        self._hung = False
        self._patient = False
        self._batches: queue.SimpleQueue[object] = queue.SimpleQueue()
        """Batches, _NUDGE, _STOP."""
        self._thread: threading.Thread | None = None

    async def run(self, calls: Sequence[Call], patience: float = 0.0) -> list[Any]:
        if not calls:
            await trio.lowlevel.checkpoint()
            return []
        batch = self._put(calls, patience)
        self._patient = patience > 0
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

    def nudge(self) -> None:
        if self._patient:
            self._patient = False
            self._batches.put(_NUDGE)

    async def close(self, final: Callable[[], None]) -> bool:
        if self._hung:
            return False
        batch = self._put([Call("close", final, (), lambda _: None)])
        self._batches.put(_STOP)
        with trio.move_on_after(self._exit_grace, shield=True):
            await batch.done.wait()
        if batch.error is not None:
            logger.error("the transfer agent was not closed cleanly: %s", batch.error)
        return batch.done.is_set() and batch.error is None

    def _put(self, calls: Sequence[Call], patience: float = 0.0) -> _Batch:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="pdserve-nixl", daemon=True)
            self._thread.start()
        batch = _Batch(calls, patience)
        self._batches.put(batch)
        return batch

    def _serve(self) -> None:
        item = self._batches.get()
        while item is not _STOP:
            # Anything else is a nudge that came after the fact.
            item = self._work(item) if isinstance(item, _Batch) else self._batches.get()

    def _work(self, batch: _Batch) -> object:
        """Make the batch's calls, again while it is patient; what has come in meanwhile, or comes next."""
        following: object = _NUDGE
        while batch.perform():
            with contextlib.suppress(queue.Empty):
                following = self._batches.get(timeout=_PAUSE)
                break
        batch.finish()
        return following
