"""Physical request slots of an engine."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class SlotPool:
    """`capacity` slots, numbered from 0; the lowest free ones go first. used + free = capacity (invariant I1)."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"at least one slot is needed, not {capacity}")
        self.capacity = capacity
        self._free = list(range(capacity))
        self._used: set[int] = set()

    @property
    def used(self) -> int:
        return len(self._used)

    @property
    def free(self) -> int:
        return len(self._free)

    def __contains__(self, slot: object) -> bool:
        """Is this slot in use?"""
        return slot in self._used

    def allocate(self, n: int = 1) -> tuple[int, ...] | None:
        """`n` slots at once, or None and nothing has changed."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} slots")
        if n > len(self._free):
            return None
        slots = tuple(heappop(self._free) for _ in range(n))
        self._used.update(slots)
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Recycle slots. Raises RuntimeError, and nothing has changed, when one is not in use or named twice."""
        recycled = tuple(slots)
        if len(set(recycled)) != len(recycled) or not self._used.issuperset(recycled):
            raise RuntimeError(f"slots {recycled} are not all in use: {sorted(self._used)}")
        for slot in recycled:
            self._used.remove(slot)
            heappush(self._free, slot)
