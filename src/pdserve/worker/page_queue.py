"""First come, first served access to the KV pages of a Decode node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine.radix import KvCache


@attrs.define(eq=False)
class _Waiter:
    tokens: Sequence[int]
    limit: int
    total: int
    ready: trio.Event
    claim: tuple[list[int], int] | None = None


class PageQueue:
    """Waits for pages in strict order: a head that does not fit yet is not overtaken."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._waiting: dict[_Waiter, None] = {}

    def pump(self) -> None:
        """Pages may have come free: serve the head as long as it fits. For `KvCache.on_available`."""
        while self._waiting:
            head = next(iter(self._waiting))
            head.claim = self._cache.claim(head.tokens, head.limit, head.total)
            if head.claim is None:
                return
            del self._waiting[head]
            head.ready.set()

    async def claim(self, tokens: Sequence[int], limit: int, total: int) -> tuple[list[int], int]:
        """`total` pinned pages, the first ones from the prefix cache: (pages, how many of them are cached).

        The caller bounds the wait. A claim that is granted while its caller is cancelled goes back.
        """
        waiter = _Waiter(tokens, limit, total, trio.Event())
        self._waiting[waiter] = None
        self.pump()
        try:
            if waiter.claim is None:
                await waiter.ready.wait()
        except trio.Cancelled:
            self._waiting.pop(waiter, None)
            if waiter.claim is not None:
                self._cache.release(waiter.claim[0])
            self.pump()
            raise
        assert waiter.claim is not None
        return waiter.claim
