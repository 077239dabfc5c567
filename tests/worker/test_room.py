"""Places in the queue for slots and pages: order of drawing, all or nothing, timeout, cancel, grant and cancel."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from pdserve.engine.radix import KvCache
from pdserve.engine.slots import SlotPool
from pdserve.worker.room import RoomQueue, Wish

pytestmark = pytest.mark.trio

PAGE = 4


@pytest.fixture
def cache():
    return KvCache(4, PAGE)


@pytest.fixture
def slots():
    return SlotPool(4)


@pytest.fixture
def queue(slots, cache):
    queue = RoomQueue(slots, cache)
    cache.on_available = queue.pump
    return queue


def free(cache: KvCache) -> int:
    cache.check_integrity()
    return cache.available


def pages(number: int, slots: int = 1) -> Wish:
    return Wish(slots, [1], 0, number)


async def test_room_that_is_there_is_claimed_without_a_checkpoint(cache, slots, queue, autojump_clock):
    with queue.join() as place, trio.CancelScope() as scope:
        scope.cancel()
        room = await place.claim(Wish(3, [1, 2, 3], 3, 2))
    assert (len(room.slots), len(room.pages), room.cached) == (3, 2, 0)
    assert (free(cache), slots.free) == (2, 1)
    queue.give_back(room)
    assert (free(cache), slots.free) == (4, 4)


async def test_cached_pages_come_first(cache, queue, autojump_clock):
    tokens = list(range(8))
    with queue.join() as place:
        room = await place.claim(Wish(1, tokens, 8, 2))
    cache.insert(tokens, room.pages)
    queue.give_back(room)
    with queue.join() as place:
        again = await place.claim(Wish(1, tokens, 7, 3))
    assert (again.pages[0], again.cached) == (room.pages[0], 1)


async def test_a_place_drawn_earlier_is_served_earlier_though_it_asks_later(cache, queue, autojump_clock):
    order = []
    with queue.join() as first, queue.join() as second:

        async def ask(name, place):
            room = await place.claim(pages(3))
            order.append(name)
            queue.give_back(room)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "second", second)
            await trio.testing.wait_all_tasks_blocked()
            assert order == []
            nursery.start_soon(ask, "first", first)
    assert order == ["first", "second"]
    assert free(cache) == 4


async def test_a_head_that_does_not_fit_is_not_overtaken_and_lets_the_next_in_when_it_times_out(
    cache, queue, autojump_clock
):
    held, _ = cache.claim([], 0, 2)
    claimed = trio.Event()

    async def head():
        with queue.join() as place, trio.move_on_after(2) as scope:
            await place.claim(pages(3))
        assert scope.cancelled_caught

    async def small(place):
        with place:
            room = await place.claim(pages(1))
            claimed.set()
            queue.give_back(room)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(head)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(small, queue.join())
        await trio.sleep(1.9)
        assert not claimed.is_set()
        with trio.fail_after(0.2):
            await claimed.wait()
    cache.release(held)
    assert free(cache) == 4


@pytest.mark.parametrize("grant_first", [True, False])
async def test_grant_and_cancel_in_one_tick_lose_nothing(cache, slots, queue, grant_first, autojump_clock):
    held, _ = cache.claim([], 0, 4)
    scope, taken = trio.CancelScope(), []

    async def waiter():
        with scope, queue.join() as place:
            taken.append(await place.claim(pages(2, slots=3)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiter)
        await trio.testing.wait_all_tasks_blocked()
        steps = [lambda: cache.release(held), scope.cancel]
        for step in steps if grant_first else reversed(steps):
            step()
    for room in taken:
        queue.give_back(room)
    assert (free(cache), slots.used) == (4, 0)


async def test_slots_are_rolled_back_where_the_pages_do_not_fit(cache, slots, queue, autojump_clock):
    held, _ = cache.claim([], 0, 3)
    with queue.join() as place, trio.move_on_after(1) as scope:
        await place.claim(pages(2, slots=3))
    assert scope.cancelled_caught
    assert slots.used == 0
    cache.release(held)
    assert free(cache) == 4


async def test_a_wait_for_slots_takes_no_page_and_ends_when_all_of_them_are_free(cache, slots, queue, autojump_clock):
    held, got = slots.allocate(3), []

    async def waiter():
        with queue.join() as place:
            got.append(await place.claim(pages(1, slots=2)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiter)
        await trio.testing.wait_all_tasks_blocked()
        assert (free(cache), slots.used, got) == (4, 3, [])
        slots.release(held[:1])
        queue.pump()
        await trio.testing.wait_all_tasks_blocked()
    assert len(got) == 1
    slots.release(held[1:])
    queue.give_back(got[0])
    assert (free(cache), slots.used) == (4, 0)


async def test_a_parked_place_is_passed_and_comes_first_again_when_it_is_claimed(cache, slots, queue, autojump_clock):
    held, order = slots.allocate(4), []

    async def ask(name, place):
        with place:
            order.append((name, await place.claim(pages(1, slots=4))))
            await trio.sleep(1)
            queue.give_back(order[-1][1])
            queue.pump()

    reservation, later, last = queue.join(), queue.join(), queue.join()
    reservation.park()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "later", later)
        nursery.start_soon(ask, "last", last)
        await trio.testing.wait_all_tasks_blocked()
        slots.release(held)
        queue.pump()
        await trio.testing.wait_all_tasks_blocked()
        reservation.unpark()
        nursery.start_soon(ask, "reservation", reservation)
    assert [name for name, _ in order] == ["later", "reservation", "last"]
    assert (free(cache), slots.used) == (4, 0)


async def test_a_place_left_without_asking_makes_way(cache, queue, autojump_clock):
    with queue.join():
        blocked = queue.join()
    with blocked, trio.fail_after(1):
        room = await blocked.claim(pages(4))
    queue.give_back(room)
    assert free(cache) == 4


async def test_fifty_places_freed_at_once_are_taken_in_order(autojump_clock):
    cache = KvCache(50, PAGE)
    queue = RoomQueue(SlotPool(50), cache)
    cache.on_available = queue.pump
    held, _ = cache.claim([], 0, 50)
    order = []

    async def ask(i, place):
        with place:
            await place.claim(pages(1))
            order.append(i)

    async with trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(ask, i, queue.join())
        await trio.testing.wait_all_tasks_blocked()
        cache.release(held)
    assert order == list(range(50))
