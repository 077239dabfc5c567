"""The slot pool, case by case."""

from __future__ import annotations

import pytest

from pdserve.admission.pool import QueueFullError, SlotAdmission, TicketState


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
