"""The engine's one thread: every call of an engine runs on it, serially, under a deadline.

Not `trio.to_thread`: that picks any thread of a pool, and OpenMP builds a new team of threads for each one it meets.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import outcome
import trio

from pdserve.errors import FatalError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

T = TypeVar("T")

_EXIT_GRACE = 1.0
"""Seconds that a cancelled caller still waits for the call in progress, so that no memory goes away under it."""


class OwnerThread:
    """A context manager around one daemon thread. Daemon: a hung call must not keep the process from exiting."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    async def call(self, fn: Callable[..., T], *args: Any, timeout: float) -> T:  # noqa: ANN401
        """Run `fn(*args)` on the thread. Raises what it raises, and FatalError when it takes over `timeout` seconds."""
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()
        result: list[outcome.Outcome[T]] = []

        def work() -> None:
            result.append(outcome.capture(fn, *args))
            with contextlib.suppress(trio.RunFinishedError):  # then nobody is left to be told
                token.run_sync_soon(done.set)

        self._calls.put(work)
        with trio.move_on_after(timeout):
            try:
                await done.wait()
            except trio.Cancelled:
                with trio.move_on_after(_EXIT_GRACE, shield=True):
                    await done.wait()
                raise
        if not result:
            raise FatalError(f"{self._name}: {getattr(fn, '__name__', 'call')} hung for {timeout:g} s")
        return result[0].unwrap()

    def __enter__(self) -> OwnerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self._calls.put(None)

    def _serve(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
