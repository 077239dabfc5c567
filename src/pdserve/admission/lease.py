"""The async shell of the slot pool: waiting for a ticket under a deadline, and the lease that is released once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pdserve.admission.pool import TicketState

if TYPE_CHECKING:
    from types import TracebackType

    from pdserve.admission.pool import SlotAdmission


class Lease:
    """A ticket of the pool, taken synchronously on construction; as a context manager it cannot be left behind.

    Constructing raises QueueFullError. `release` is synchronous and idempotent: it cancels a ticket that waits and
    gives the slots of a granted one to the next in line.
    """

    def __init__(self, pool: SlotAdmission, n: int = 1) -> None:
        self._pool = pool
        self._ticket = pool.request(n)
        self._granted = trio.Event()
        self._kept = False
        self._ticket.on_grant = self._granted.set

    @property
    def granted(self) -> bool:
        return self._ticket.state is TicketState.GRANTED

    async def wait(self) -> None:
        """Return once the slots are held. The caller bounds it (`trio.fail_at`)."""
        if not self.granted:
            await self._granted.wait()

    def keep(self) -> None:
        """Leaving the context no longer releases: somebody else (the request slot's end) does."""
        self._kept = True

    def release(self) -> None:
        self._pool.close(self._ticket)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        if not self._kept:
            self.release()
