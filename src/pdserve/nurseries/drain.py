"""Signals → drain → deadline. A signal does nothing but set an event; whoever serves watches it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NoReturn

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


STOPPING = (signal.SIGTERM, signal.SIGINT)
"""Ask a process to drain; a second one, to end at once."""


def hangup() -> tuple[signal.Signals, ...]:
    """SIGHUP, the end of the terminal, unless it is ignored here: under nohup it stays so."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


def _exit_now() -> None:
    os._exit(130)


class Drain:
    """The one decision of a process to finish what it has and take no more. It is never taken back."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.reason: str | None = None
        self._since = 0.0

    @property
    def draining(self) -> bool:
        return self.started.is_set()

    def start(self, reason: str) -> None:
        """Begin to drain. The first reason stays."""
        if not self.draining:
            self.reason = reason
            self._since = trio.current_time()
            self.started.set()

    async def on_signals(
        self,
        *,
        second: Callable[[], None] = _exit_now,
        signals: Sequence[signal.Signals] | None = None,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> NoReturn:
        """The first signal starts the drain, each later one calls `second` (exits at once with status 130).

        `signals`: those that stop a process, and SIGHUP, unless said otherwise. SIGHUP never calls `second`: when a
        terminal goes, kernel and shell both send it. A drain that began for another reason does not count as the first
        signal. Never returns; main thread only.
        """
        wanted = (*STOPPING, *hangup()) if signals is None else signals
        with trio.open_signal_receiver(*wanted) as received:
            task_status.started()
            first = True
            async for number in received:
                if first:
                    self.start(signal.Signals(number).name)
                    first = False
                elif number != signal.SIGHUP:
                    second()
        raise AssertionError("unreachable")

    async def within(self, timeout: float) -> None:
        """Wait for the drain's deadline: `timeout` seconds after it started, whenever this is called."""
        await self.started.wait()
        await trio.sleep_until(self._since + timeout)
