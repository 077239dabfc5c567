"""The real slot pool, watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.admission.pool import SlotAdmission, TicketState

if TYPE_CHECKING:
    from pdserve.admission.pool import Ticket


class WatchedPool(SlotAdmission):
    """Counts the slots in use by itself and asserts at every grant that they are no more than `capacity`."""

    def __init__(self, capacity: int, queue_size: int | None) -> None:
        super().__init__(capacity, queue_size)
        self._line: dict[Ticket, None] = {}
        """Not granted yet, as far as has been looked; the pool grants in this order."""
        self.held = 0
        self.peak = 0

    def request(self, n: int = 1) -> Ticket:
        ticket = super().request(n)
        self._line[ticket] = None
        self._look()
        return ticket

    def close(self, ticket: Ticket) -> None:
        held = ticket.n if ticket.state is TicketState.GRANTED else 0
        super().close(ticket)
        self.held -= held
        self._line.pop(ticket, None)
        self._look()

    def _look(self) -> None:
        """Only `request` and `close` grant: whatever is granted was so in the call that ends here."""
        while self._line and (head := next(iter(self._line))).state is TicketState.GRANTED:
            del self._line[head]
            self.held += head.n
            assert self.held <= self.capacity, f"{self.held} slots of {self.capacity} are held"
            self.peak = max(self.peak, self.held)
