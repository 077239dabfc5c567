"""Who gets the slots next, and when, in virtual time: always the head, in the very tick in which it fits."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from pdserve.admission.lease import Lease
from pdserve.admission.pool import QueueFullError, SlotAdmission

pytestmark = pytest.mark.trio


class Line:
    """Tasks that wait for a lease, and the time at which each was granted, in order of the grants."""

    def __init__(self, nursery: trio.Nursery, pool: SlotAdmission) -> None:
        self._nursery = nursery
        self._pool = pool
        self._began = trio.current_time()
        self.granted: dict[str, float] = {}

    @property
    def now(self) -> float:
        return trio.current_time() - self._began

    def join(self, name: str, n: int = 1, *, holds: float = 0, patience: float = math.inf) -> trio.CancelScope:
        """Take the ticket now, as a link's reader does. The scope cancels the wait."""
        scope = trio.CancelScope(deadline=trio.current_time() + patience)
        self._nursery.start_soon(self._run, name, Lease(self._pool, n), scope, holds)
        return scope

    async def _run(self, name: str, lease: Lease, scope: trio.CancelScope, holds: float) -> None:
        with lease:
            with scope:
                await lease.wait()
            if lease.granted:
                self.granted[name] = self.now
                await trio.sleep(holds)


def empty(pool: SlotAdmission) -> bool:
    pool.check_integrity()
    return (pool.active, pool.queued) == (0, 0)


async def test_a_big_one_waits_first_in_line_and_small_ones_that_would_fit_wait_behind_it(autojump_clock):
    pool = SlotAdmission(3, None)
    async with trio.open_nursery() as nursery:
        line = Line(nursery, pool)
        line.join("one", holds=5)
        line.join("two", holds=9)
        line.join("big", 3, holds=1)
        await trio.sleep(1)
        line.join("small", holds=1)
        line.join("smaller", holds=1)
        await trio.sleep(5)
        assert (pool.active, pool.queued) == (1, 5)
    assert line.granted == {"one": 0, "two": 0, "big": 9, "small": 10, "smaller": 10}
    assert empty(pool)


@pytest.mark.parametrize("leaves", ["cancelled", "timed out"])
async def test_when_the_head_leaves_all_behind_it_that_fit_are_granted_in_that_tick(leaves, autojump_clock):
    pool = SlotAdmission(3, None)
    async with trio.open_nursery() as nursery:
        line = Line(nursery, pool)
        line.join("holder", holds=10)
        head = line.join("head", 3, patience=4 if leaves == "timed out" else math.inf)
        line.join("first", holds=10)
        line.join("second", holds=10)
        line.join("third")
        await trio.sleep(4)
        if leaves == "cancelled":
            head.cancel()
    assert line.granted.pop("third") == 10
    assert line.granted == {"holder": 0, "first": 4, "second": 4}
    assert empty(pool)


@pytest.mark.parametrize("grant_first", [True, False])
async def test_a_lease_granted_in_the_tick_in_which_its_wait_ends_is_held(grant_first, autojump_clock):
    pool = SlotAdmission(1, 2)
    held = Lease(pool)
    async with trio.open_nursery() as nursery:
        line = Line(nursery, pool)
        late = line.join("late", holds=3)
        line.join("next")
        await trio.sleep(2)
        steps = [held.release, late.cancel]
        for step in steps if grant_first else reversed(steps):
            step()
    assert line.granted == {"late": 2, "next": 5}
    assert empty(pool)


async def test_one_slot_is_handed_on_in_order_without_a_gap(autojump_clock):
    pool = SlotAdmission(1, None)
    async with trio.open_nursery() as nursery:
        line = Line(nursery, pool)
        for i in range(20):
            line.join(str(i), holds=2)
    assert line.granted == {str(i): 2 * i for i in range(20)}
    assert list(line.granted) == [str(i) for i in range(20)]
    assert empty(pool)


async def test_without_a_queue_a_lease_is_granted_or_refused_at_once(autojump_clock):
    pool = SlotAdmission(2, 0)
    async with trio.open_nursery() as nursery:
        line = Line(nursery, pool)
        line.join("one", holds=3)
        with pytest.raises(QueueFullError):
            line.join("too big for what is free", 2)
        line.join("two", holds=1)
        with pytest.raises(QueueFullError):
            line.join("too many")
        await trio.sleep(3.5)
        line.join("both", 2)
    assert line.granted == {"one": 0, "two": 0, "both": 3.5}
    assert empty(pool)


async def test_who_asks_for_more_than_the_free_part_of_the_queue_is_refused_and_a_smaller_one_gets_in(autojump_clock):
    pool = SlotAdmission(4, 4)
    async with trio.open_nursery() as nursery:
        line = Line(nursery, pool)
        line.join("holder", 4, holds=5)
        line.join("first", 2)
        with pytest.raises(QueueFullError, match="2 of 4"):
            line.join("three", 3)
        assert (pool.active, pool.queued, line.now) == (4, 2, 0)
        line.join("second", 2)
        with pytest.raises(QueueFullError, match="4 of 4"):
            line.join("one")
    assert line.granted == {"holder": 0, "first": 5, "second": 5}
    assert empty(pool)


async def test_more_slots_than_the_node_has_fail_at_once_though_the_queue_has_room(autojump_clock):
    pool = SlotAdmission(2, None)
    with Lease(pool):
        with pytest.raises(ValueError, match="3 slots asked of a node with 2"):
            Lease(pool, 3)
        assert (pool.active, pool.queued) == (1, 0)
    assert empty(pool)


async def test_each_part_of_a_split_lease_goes_to_the_head_when_it_is_released(autojump_clock):
    pool = SlotAdmission(4, None)
    with Lease(pool, 4) as lease:
        parts = lease.split()
    async with trio.open_nursery() as nursery:
        line = Line(nursery, pool)
        line.join("one", holds=9)
        line.join("two", 2, holds=9)
        line.join("last", holds=9)
        for part in parts:
            await trio.sleep(1)
            part.release()
            part.release()
            lease.release()
            assert pool.active == (3 if part is parts[1] else 4)
    assert line.granted == {"one": 1, "two": 3, "last": 4}
    assert empty(pool)


async def test_a_lost_link_gives_back_leases_in_every_state_in_that_very_tick(autojump_clock):
    pool = SlotAdmission(4, None)

    async def serve(lease: Lease) -> None:
        with lease:
            await lease.wait()
            await trio.sleep_forever()

    async def serve_choices(lease: Lease) -> None:
        with lease:
            parts = lease.split()
            parts[0].release()
            try:
                await trio.sleep_forever()
            finally:
                for part in parts:
                    part.release()

    async with trio.open_nursery() as other:
        line = Line(other, pool)
        async with trio.open_nursery() as link:
            link.start_soon(serve, Lease(pool))  # holds
            link.start_soon(serve_choices, Lease(pool, 3))  # is split, and one choice has ended
            await trio.testing.wait_all_tasks_blocked()
            link.start_soon(serve, Lease(pool, 2))  # waits, first in line
            await trio.testing.wait_all_tasks_blocked()
            link.start_soon(serve, Lease(pool))  # waits, though it would fit, and will be granted on the way out
            await trio.testing.wait_all_tasks_blocked()
            line.join("of another link", 4, holds=1)
            link.start_soon(serve, Lease(pool))  # its task has not run yet
            assert (pool.active, pool.queued) == (3, 8)
            before = line.now
            link.cancel_scope.cancel()
        assert line.now == before
        assert (pool.active, pool.queued) == (4, 0)
    assert line.granted == {"of another link": before}
    assert empty(pool)
