"""Adaptive polling of something that cannot wake us: fast while there is progress, slow when idle."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Poller:
    """Calls `poll` again and again. All times are seconds.

    After a poll that made progress (returned True) it pauses for `fast`; each poll without progress makes the next
    pause `grow` times longer, up to `slow`. While `busy()` no pause is longer than `fast_cap`.
    """

    def __init__(
        self,
        *,
        poll: Callable[[], Awaitable[bool]],
        fast: float = 0.001,
        slow: float = 0.05,
        grow: float = 1.5,
        busy: Callable[[], bool] | None = None,
        fast_cap: float = 0.002,
    ) -> None:
        if not (0 < fast <= slow and grow > 1 and fast_cap > 0):
            raise ValueError(f"need 0 < fast <= slow, grow > 1, fast_cap > 0, not {fast}, {slow}, {grow}, {fast_cap}")
        self._poll = poll
        self._fast = fast
        self._slow = slow
        self._grow = grow
        self._busy = busy
        self._fast_cap = fast_cap
        self._kicked = trio.Event()

    def kick(self) -> None:
        """Poll at once and be fast again: something is about to happen. One during a poll causes another poll."""
        self._kicked.set()

    async def run(self) -> NoReturn:
        """Never returns; raises what `poll` raises. To be run once."""
        pause = self._fast
        while True:
            self._kicked = trio.Event()
            if await self._poll():
                pause = self._fast
            capped = min(pause, self._fast_cap) if self._busy is not None and self._busy() else pause
            with trio.move_on_after(capped):
                await self._kicked.wait()
            pause = self._fast if self._kicked.is_set() else min(pause * self._grow, self._slow)
