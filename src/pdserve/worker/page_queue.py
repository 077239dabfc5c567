"""First come, first served access to the KV pages of a Decode node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from pdserve.engine.radix import KvCache


class PageQueue:
    """Places in strict order of their drawing: a head that does not fit, or has not asked yet, is not overtaken."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._places: dict[PagePlace, None] = {}

    def join(self) -> PagePlace:
        """Draw a place, synchronously. Leave it by its context."""
        place = PagePlace(self, self._cache)
        self._places[place] = None
        return place

    def pump(self) -> None:
        """Pages may have come free: serve the head. For `KvCache.on_available`.

        One at a time, the next when the head has taken its pages: tasks woken together would run in any order.
        """
        head = next(iter(self._places), None)
        if head is not None:
            head.serve()

    def leave(self, place: PagePlace) -> None:
        """Idempotent."""
        if place in self._places:
            del self._places[place]
            self.pump()


class PagePlace:
    """One place in the queue. A context manager: left without `claim` having returned, it takes nothing with it."""

    def __init__(self, queue: PageQueue, cache: KvCache) -> None:
        self._queue = queue
        self._cache = cache
        self._wanted: tuple[Sequence[int], int, int] | None = None
        self._granted: tuple[list[int], int] | None = None
        self._ready = trio.Event()

    async def claim(self, tokens: Sequence[int], limit: int, total: int) -> tuple[list[int], int]:
        """`total` pinned pages, the first ones from the prefix cache: (pages, how many of them are cached).

        Returns without a checkpoint when they are there. The caller bounds the wait; the pages are then the caller's.
        """
        self._wanted = (tokens, limit, total)
        self._queue.pump()
        if self._granted is None:
            await self._ready.wait()
        assert self._granted is not None
        granted, self._granted = self._granted, None
        self._queue.leave(self)
        return granted

    def serve(self) -> None:
        """For the queue: take the pages if they are wanted and fit."""
        if self._wanted is not None and self._granted is None:
            self._granted = self._cache.claim(*self._wanted)
            if self._granted is not None:
                self._ready.set()

    def __enter__(self) -> PagePlace:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self._wanted = None
        granted, self._granted = self._granted, None
        if granted is not None:
            self._cache.release(granted[0])
        self._queue.leave(self)
