"""Waiting for a lease in virtual time: success, timeout, cancel, and both in one tick."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from pdserve.admission.lease import Lease
from pdserve.admission.pool import QueueFullError, SlotAdmission

pytestmark = pytest.mark.trio


def empty(pool: SlotAdmission) -> bool:
    pool.check_integrity()
    return (pool.active, pool.queued) == (0, 0)


async def test_a_free_slot_is_held_without_waiting(autojump_clock):
    pool = SlotAdmission(1, 0)
    with Lease(pool) as lease:
        with trio.CancelScope() as scope:
            scope.cancel()
            await lease.wait()  # no checkpoint: what is granted is never lost to a cancel
        assert lease.granted
        assert not scope.cancelled_caught
        assert pool.active == 1
    assert empty(pool)


async def test_a_waiter_gets_the_slot_at_the_moment_it_is_released(autojump_clock):
    pool = SlotAdmission(1, 1)
    first = Lease(pool)
    began = trio.current_time()

    async def release_later():
        await trio.sleep(3)
        first.release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(release_later)
        with Lease(pool) as second:
            assert not second.granted
            with trio.fail_after(5):
                await second.wait()
            assert trio.current_time() - began == 3
            assert pool.active == 1
    assert empty(pool)


async def test_a_waiter_that_times_out_leaves_the_queue(autojump_clock):
    pool = SlotAdmission(1, 1)
    with Lease(pool):
        with pytest.raises(trio.TooSlowError), trio.fail_after(2), Lease(pool) as second:
            await second.wait()
        assert (pool.active, pool.queued) == (1, 0)
    assert empty(pool)


@pytest.mark.parametrize("grant_first", [True, False])
async def test_grant_and_cancel_in_one_tick_lose_nothing(grant_first, autojump_clock):
    pool = SlotAdmission(1, 2)
    held = Lease(pool)
    scope = trio.CancelScope()
    outcome = []

    async def waiter():
        with scope, Lease(pool) as lease:
            await lease.wait()
            outcome.append("granted")
        outcome.append("left")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiter)
        await trio.testing.wait_all_tasks_blocked()
        steps = [held.release, scope.cancel]
        for step in steps if grant_first else reversed(steps):
            step()
    assert outcome[-1] == "left"
    assert empty(pool)
    with Lease(pool) as again:
        assert again.granted


async def test_a_lease_is_released_once_however_often_it_is_asked(autojump_clock):
    pool = SlotAdmission(2, 2)
    first, second = Lease(pool), Lease(pool)
    for _ in range(3):
        first.release()
    assert pool.active == 1
    pool.check_integrity()
    second.release()
    assert empty(pool)


async def test_a_split_lease_is_given_back_slot_by_slot_and_outlives_its_context(autojump_clock):
    pool = SlotAdmission(3, 0)
    with Lease(pool, 3) as lease:
        first, second, third = lease.split()
    assert pool.active == 3
    lease.release()
    assert pool.active == 3
    second.release()
    second.release()
    assert pool.active == 2
    first.release()
    third.release()
    assert empty(pool)


async def test_a_lease_that_waits_cannot_be_split(autojump_clock):
    pool = SlotAdmission(1, 1)
    with Lease(pool), Lease(pool) as waiting, pytest.raises(ValueError, match="waiting"):
        waiting.split()
    assert empty(pool)


async def test_a_full_queue_refuses_the_lease_and_takes_nothing(autojump_clock):
    pool = SlotAdmission(1, 0)
    with Lease(pool):
        with pytest.raises(QueueFullError):
            Lease(pool)
        assert (pool.active, pool.queued) == (1, 0)
    assert empty(pool)


async def test_two_hundred_waiters_are_granted_in_order_of_their_leases(autojump_clock):
    pool = SlotAdmission(3, None)
    order = []

    async def run(i: int, lease: Lease):
        with lease:
            await lease.wait()
            order.append(i)
            await trio.sleep(0.01 * (1 + i % 3))

    async with trio.open_nursery() as nursery:
        for i in range(200):
            nursery.start_soon(run, i, Lease(pool))  # the ticket is drawn here, the tasks start in any order
    # Who is granted in the same instant runs in any order; grants of different instants never swap.
    assert sorted(order) == list(range(200))
    assert all(abs(place - i) < 3 for place, i in enumerate(order))
    assert empty(pool)
