"""The slot pool under random operations, against a naive model (I1, I2, I3)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.admission.pool import QueueFullError, SlotAdmission, Ticket, TicketState


class PoolMachine(RuleBasedStateMachine):
    """The model: open tickets in order of arrival, granted by naive FIFO."""

    @initialize(capacity=st.integers(1, 6), queue_size=st.none() | st.integers(0, 8))
    def create(self, capacity: int, queue_size: int | None) -> None:
        self.pool = SlotAdmission(capacity, queue_size)
        self.queue_size = queue_size
        self.held: list[Ticket] = []
        self.waiting: list[Ticket] = []
        self.calls: list[Ticket] = []
        self.expected_calls: list[Ticket] = []

    def free(self) -> int:
        return self.pool.capacity - sum(ticket.n for ticket in self.held)

    def hand_over(self) -> None:
        while self.waiting and self.waiting[0].n <= self.free():
            head = self.waiting.pop(0)
            self.held.append(head)
            self.expected_calls.append(head)

    @rule(data=st.data())
    def request(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, self.pool.capacity))
        at_once = not self.waiting and n <= self.free()
        queued = sum(ticket.n for ticket in self.waiting)
        if not at_once and self.queue_size is not None and queued + n > self.queue_size:
            with pytest.raises(QueueFullError):
                self.pool.request(n)
            return
        ticket = self.pool.request(n)
        assert (ticket.state is TicketState.GRANTED) == at_once
        if at_once:
            self.held.append(ticket)
        else:
            ticket.on_grant = lambda: self.calls.append(ticket)
            self.waiting.append(ticket)

    @precondition(lambda self: self.held or self.waiting)
    @rule(data=st.data(), again=st.booleans())
    def close(self, data: st.DataObject, again: bool) -> None:
        ticket = data.draw(st.sampled_from(self.held + self.waiting))
        (self.held if ticket in self.held else self.waiting).remove(ticket)
        self.hand_over()
        for _ in range(1 + again):
            self.pool.close(ticket)
        assert ticket.state is TicketState.CLOSED

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.active == sum(ticket.n for ticket in self.held)
        assert self.pool.queued == sum(ticket.n for ticket in self.waiting)
        assert all(ticket.state is TicketState.GRANTED for ticket in self.held)
        assert all(ticket.state is TicketState.WAITING for ticket in self.waiting)
        assert self.calls == self.expected_calls

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for ticket in self.waiting + self.held:
            self.pool.close(ticket)
        self.pool.check_integrity()
        assert (self.pool.active, self.pool.queued) == (0, 0)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("n", [0, -1, 4])
def test_a_count_that_can_never_be_granted_is_refused_and_takes_nothing(n):
    pool = SlotAdmission(3, 10)
    with pytest.raises(ValueError, match="slots asked"):
        pool.request(n)
    assert (pool.active, pool.queued) == (0, 0)


@pytest.mark.parametrize(("capacity", "queue_size"), [(0, 1), (-1, None), (1, -1)])
def test_a_pool_without_slots_or_with_a_negative_queue_is_refused(capacity, queue_size):
    with pytest.raises(ValueError, match="out of range"):
        SlotAdmission(capacity, queue_size)


def test_a_waiting_head_keeps_slots_idle_and_is_not_overtaken():
    pool = SlotAdmission(2, None)
    first = pool.request(1)
    head, small = pool.request(2), pool.request(1)
    assert (head.state, small.state) == (TicketState.WAITING, TicketState.WAITING)
    pool.close(head)
    assert small.state is TicketState.GRANTED
    pool.close(first)
    pool.close(small)
    assert pool.active == 0


def test_a_queue_of_size_zero_grants_or_refuses_at_once():
    pool = SlotAdmission(1, 0)
    held = pool.request()
    with pytest.raises(QueueFullError):
        pool.request()
    pool.close(held)
    assert pool.request().state is TicketState.GRANTED
