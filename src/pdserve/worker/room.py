"""First come, first served access to the request slots and KV pages of a Decode node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from pdserve.engine.radix import KvCache
    from pdserve.engine.slots import SlotPool


@attrs.frozen
class Room:
    """What one request runs in: a slot for each choice, and pinned pages, of which the first `cached` hold KV."""

    slots: tuple[int, ...]
    pages: list[int]
    cached: int


@attrs.frozen
class Wish:
    slots: int
    tokens: Sequence[int]
    limit: int
    """Only the first so many tokens may come from the prefix cache."""
    pages: int
    """In all, cached ones included."""


class RoomQueue:
    """Places in strict order of their drawing: a head that does not fit, or has not asked yet, is not overtaken.

    Only a parked place, whose Master has not claimed its reservation yet, lets those behind it pass.
    """

    def __init__(self, slots: SlotPool, cache: KvCache) -> None:
        self._slots = slots
        self._cache = cache
        self._places: dict[Place, None] = {}

    def join(self) -> Place:
        """Draw a place, synchronously. Leave it by its context."""
        place = Place(self)
        self._places[place] = None
        return place

    def pump(self) -> None:
        """Slots or pages may have come free: serve the head. For `KvCache.on_available` and recycled slots.

        One at a time, the next when the head has taken its room: tasks woken together would run in any order.
        """
        head = next((place for place in self._places if not place.parked), None)
        if head is not None:
            head.serve()

    def leave(self, place: Place) -> None:
        """Idempotent."""
        if place in self._places:
            del self._places[place]
            self.pump()

    def allocate(self, wish: Wish) -> Room | None:
        """All slots and all pages, or None and nothing has changed (I3)."""
        slots = self._slots.allocate(wish.slots)
        if slots is None:
            return None
        claimed = self._cache.claim(wish.tokens, wish.limit, wish.pages)
        if claimed is None:
            self._slots.release(slots)
            return None
        return Room(slots, *claimed)

    def give_back(self, room: Room) -> None:
        self._slots.release(room.slots)
        self._cache.release(room.pages)


class Place:
    """One place in the queue. A context manager: left without `claim` having returned, it takes nothing with it."""

    def __init__(self, queue: RoomQueue) -> None:
        self._queue = queue
        self._wish: Wish | None = None
        self._granted: Room | None = None
        self._ready = trio.Event()
        self.parked = False

    def park(self) -> None:
        """Those behind may pass until `unpark`."""
        self.parked = True
        self._queue.pump()

    def unpark(self) -> None:
        self.parked = False

    async def claim(self, wish: Wish) -> Room:
        """The room wished for, which is then the caller's. Returns without a checkpoint when it is there.

        The caller bounds the wait; a cancelled one leaves nothing behind.
        """
        self._wish = wish
        self._queue.pump()
        if self._granted is None:
            await self._ready.wait()
        assert self._granted is not None
        granted, self._granted = self._granted, None
        self._queue.leave(self)
        return granted

    def serve(self) -> None:
        """For the queue: take the room if it is wanted and there."""
        if self._wish is not None and self._granted is None:
            self._granted = self._queue.allocate(self._wish)
            if self._granted is not None:
                self._ready.set()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self._wish = None
        granted, self._granted = self._granted, None
        if granted is not None:
            self._queue.give_back(granted)
        self._queue.leave(self)
