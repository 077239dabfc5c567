"""The Decode node's slot pool: who is admitted next. A state machine without awaits and clocks.

Strict FIFO over all Masters: a releaser hands its slots to the head of the queue, nobody re-races, nobody overtakes a
head that waits for more slots than are free.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import attrs

from pdserve.errors import PdserveError

if TYPE_CHECKING:
    from collections.abc import Callable


class QueueFullError(PdserveError):
    """The waiting queue has no room for this many slots."""


class TicketState(Enum):
    WAITING = "waiting"
    GRANTED = "granted"
    CLOSED = "closed"


@attrs.define(eq=False)
class Ticket:
    """One place in the queue, later `n` slots. Closed exactly once: cancelled while it waits, released afterwards."""

    n: int
    state: TicketState
    on_grant: Callable[[], None] | None = None
    """Called once, when a ticket that waited is granted; forgotten then, and when the ticket is closed."""


class SlotAdmission:
    """`capacity` slots and a queue of at most `queue_size` waiting *slots* (None: unbounded)."""

    def __init__(self, capacity: int, queue_size: int | None) -> None:
        if capacity < 1 or (queue_size is not None and queue_size < 0):
            raise ValueError(f"capacity {capacity} or queue size {queue_size} is out of range")
        self.capacity = capacity
        self._queue_size = queue_size
        self._free = capacity
        self._waiting: dict[Ticket, None] = {}
        self._queued = 0

    @property
    def active(self) -> int:
        """Slots held."""
        return self.capacity - self._free

    @property
    def queued(self) -> int:
        """Slots waited for."""
        return self._queued

    def request(self, n: int = 1) -> Ticket:
        """Take `n` slots, or a place in the queue for them; all at once or not at all (I3).

        Raises ValueError when n can never be granted, QueueFullError when the queue has no room.
        """
        if not 1 <= n <= self.capacity:
            raise ValueError(f"{n} slots asked of a node with {self.capacity}")
        if not self._waiting and n <= self._free:
            self._free -= n
            return Ticket(n, TicketState.GRANTED)
        if self._queue_size is not None and self._queued + n > self._queue_size:
            raise QueueFullError(f"{self._queued} of {self._queue_size} queue places are taken")
        ticket = Ticket(n, TicketState.WAITING)
        self._waiting[ticket] = None
        self._queued += n
        return ticket

    def split(self, ticket: Ticket) -> tuple[Ticket, ...]:
        """A granted ticket of n as n granted ones of a single slot, each closed by itself; the original is closed."""
        if ticket.state is not TicketState.GRANTED:
            raise ValueError(f"a {ticket.state.value} ticket cannot be split")
        ticket.state = TicketState.CLOSED
        return tuple(Ticket(1, TicketState.GRANTED) for _ in range(ticket.n))

    def close(self, ticket: Ticket) -> None:
        """Leave the queue, or give the slots back and hand them on. Idempotent."""
        state, ticket.state = ticket.state, TicketState.CLOSED
        ticket.on_grant = None
        if state is TicketState.WAITING:
            del self._waiting[ticket]
            self._queued -= ticket.n
        elif state is TicketState.GRANTED:
            self._free += ticket.n
        if state is not TicketState.CLOSED:
            self._hand_over()

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts disagree (I1) or a head that fits is left waiting (I2)."""
        assert 0 <= self._free <= self.capacity, f"{self._free} of {self.capacity} slots are free"
        assert self._queued == sum(ticket.n for ticket in self._waiting), "queued slots are miscounted"
        head = next(iter(self._waiting), None)
        assert head is None or head.n > self._free, "the head fits and waits"

    def _hand_over(self) -> None:
        while self._waiting:
            head = next(iter(self._waiting))
            if head.n > self._free:
                return
            del self._waiting[head]
            self._queued -= head.n
            self._free -= head.n
            head.state = TicketState.GRANTED
            on_grant, head.on_grant = head.on_grant, None
            if on_grant is not None:
                on_grant()
