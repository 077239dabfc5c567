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
    """Places in strict order of their drawing. Whoever asked is served in this order: a head that does not fit is not
    overtaken. A place asks when its lease is granted and its claim is there, which is in the same order but for
    reservations that their Master has not claimed yet: those are passed, and keep their place.
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
        """Slots or pages may have come free: serve whoever is next. For `KvCache.on_available` and recycled slots."""
        while (head := next((place for place in self._places if place.wish is not None), None)) is not None:
            room = self._allocate(head.wish)
            if room is None:
                return
            del self._places[head]
            head.grant(room)

    def leave(self, place: Place) -> None:
        """Idempotent."""
        if place in self._places:
            del self._places[place]
            self.pump()

    def give_back(self, room: Room) -> None:
        self._slots.release(room.slots)
        self._cache.release(room.pages)
        self.pump()

    def _allocate(self, wish: Wish | None) -> Room | None:
        """All slots and all pages, or None and nothing has changed (I3)."""
        assert wish is not None
        slots = self._slots.allocate(wish.slots)
        if slots is None:
            return None
        claimed = self._cache.claim(wish.tokens, wish.limit, wish.pages)
        if claimed is None:
            self._slots.release(slots)
            return None
        return Room(slots, *claimed)


class Place:
    """One place in the queue. A context manager: left before the room was taken, it takes nothing with it."""

    def __init__(self, queue: RoomQueue) -> None:
        self.wish: Wish | None = None
        self._queue = queue
        self._room: Room | None = None
        self._granted = trio.Event()

    def ask(self, wish: Wish) -> None:
        """From now on the room is wanted. Synchronous: where it is free and nobody is ahead, it is granted here."""
        self.wish = wish
        self._queue.pump()

    def grant(self, room: Room) -> None:
        """For the queue."""
        self._room = room
        self._granted.set()

    async def wait(self) -> None:
        """Return once the room is granted, without a checkpoint if it is. The caller bounds it."""
        if not self._granted.is_set():
            await self._granted.wait()

    def take(self) -> Room | None:
        """The granted room, which is then the caller's; None: not granted."""
        room, self._room = self._room, None
        return room

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self._queue.leave(self)
        room = self.take()
        if room is not None:
            self._queue.give_back(room)
