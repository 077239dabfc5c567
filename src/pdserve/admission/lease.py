"""The async shell of the slot pool: waiting for a ticket under a deadline, and the lease that is released once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pdserve.admission.pool import TicketState

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pdserve.admission.pool import SlotAdmission, Ticket


class Lease:
    """A ticket of the pool, taken synchronously on construction; as a context manager it cannot be left behind.

    Constructing raises QueueFullError. `release` is synchronous and idempotent: it cancels a ticket that waits and
    gives the slots of a granted one to the next in line.
    """

    def __init__(self, pool: SlotAdmission, n: int = 1) -> None:
        self.on_grant: Callable[[], None] | None = None
        """Called in the very moment of a grant that had to be waited for; forgotten then, and on release."""
        self._pool = pool
        self._asked = self.granted_at = trio.current_time()
        self._ticket = pool.request(n)
        self._changed = trio.Event()
        if self._ticket.state is TicketState.WAITING:
            self._ticket.on_grant = self._on_grant

    @property
    def granted(self) -> bool:
        return self._ticket.state is TicketState.GRANTED

    @property
    def waited(self) -> float:
        """Seconds in the queue until the grant."""
        return self.granted_at - self._asked

    async def wait(self) -> None:
        """Return once the slots are held. The caller bounds it (`trio.move_on_at`).

        Raises RuntimeError when they were given back, or split, instead.
        """
        if self._ticket.state is TicketState.WAITING:
            await self._changed.wait()
        if not self.granted:
            raise RuntimeError("the lease is over")

    def split(self) -> tuple[SubLease, ...]:
        """Hand the held slots over, one by one: each sub-lease is released with its own slot.

        This lease has nothing left to release. Raises ValueError when it is not granted.
        """
        return tuple(SubLease(self._pool, ticket) for ticket in self._pool.split(self._ticket))

    def release(self) -> None:
        self._pool.close(self._ticket)
        self.on_grant = None
        self._changed.set()

    def _on_grant(self) -> None:
        self.granted_at = trio.current_time()
        self._changed.set()
        on_grant, self.on_grant = self.on_grant, None
        if on_grant is not None:
            on_grant()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self.release()


class SubLease:
    """One slot of a lease that was split. `release` is synchronous and idempotent."""

    def __init__(self, pool: SlotAdmission, ticket: Ticket) -> None:
        self._pool = pool
        self._ticket = ticket

    def release(self) -> None:
        self._pool.close(self._ticket)
