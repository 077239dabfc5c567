"""Prompt KV that P keeps for a Decode node to pull. No I/O, no clock: times are seconds of any one clock."""

from __future__ import annotations

from itertools import count
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Hold:
    """Pages of one prompt are kept until the hold ends: exactly once, the reason given to `on_end` synchronously.

    Reasons: `pulled`, `released`, `expired`, `link`.
    """

    def __init__(
        self, table: HoldTable, id_: int, handle: bytes, timeout: float, now: float, on_end: Callable[[str], None]
    ) -> None:
        self.id = id_
        self.handle = handle
        """The encoded KvHandle, for the Decode node."""
        self.deadline = now + timeout
        self._timeout = timeout
        self._table = table
        self._on_end = on_end

    @property
    def ended(self) -> bool:
        return not self._table.alive(self.id)

    def renew(self) -> None:
        """The timeout starts anew. Nothing happens once the hold has ended."""
        self.deadline = self._table.clock() + self._timeout

    def end(self, reason: str) -> None:
        """End the hold; only the first call has an effect."""
        if self._table.discard(self):
            self._on_end(reason)


class HoldTable:
    """The living holds. Ids are never used twice, so a late pull of an ended hold finds nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._ids = count(1)
        self._holds: dict[int, Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, encode: Callable[[int], bytes], timeout: float, on_end: Callable[[str], None]) -> Hold:
        """A new hold; `encode` makes the handle for its id."""
        id_ = next(self._ids)
        hold = self._holds[id_] = Hold(self, id_, encode(id_), timeout, self.clock(), on_end)
        return hold

    def alive(self, id_: int) -> bool:
        return id_ in self._holds

    def discard(self, hold: Hold) -> bool:
        """Forget the hold; False if that happened before."""
        return self._holds.pop(hold.id, None) is not None

    def end(self, id_: int, reason: str) -> bool:
        """End the hold with that id; False, and nothing happens, if it is over or its time has run out."""
        hold = self._holds.get(id_)
        if hold is None or hold.deadline <= self.clock():
            return False
        hold.end(reason)
        return True

    def next_deadline(self) -> float:
        """When the next hold expires unless renewed; infinity when there is none."""
        return min((hold.deadline for hold in self._holds.values()), default=inf)

    def expire(self) -> None:
        """End every hold whose time has run out."""
        now = self.clock()
        for hold in [hold for hold in self._holds.values() if hold.deadline <= now]:
            hold.end("expired")

    def end_all(self, reason: str) -> None:
        for hold in list(self._holds.values()):
            hold.end(reason)
