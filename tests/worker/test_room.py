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


async def get(place, wish: Wish):
    """Ask for a room and wait for it."""
    place.ask(wish)
    await place.wait()
    return place.take()


async def test_room_that_is_there_is_granted_in_the_call(cache, slots, queue, autojump_clock):
    with queue.join() as place, trio.CancelScope() as scope:
        scope.cancel()
        room = await get(place, Wish(3, [1, 2, 3], 3, 2))
    assert (len(room.slots), len(room.pages), room.cached) == (3, 2, 0)
    assert (free(cache), slots.free) == (2, 1)
    queue.give_back(room)
    assert (free(cache), slots.free) == (4, 4)


async def test_cached_pages_come_first(cache, queue, autojump_clock):
    tokens = list(range(8))
    with queue.join() as place:
        room = await get(place, Wish(1, tokens, 8, 2))
    cache.insert(tokens, room.pages)
    queue.give_back(room)
    with queue.join() as place:
        again = await get(place, Wish(1, tokens, 7, 3))
    assert (again.pages[0], again.cached) == (room.pages[0], 1)


async def test_those_who_asked_are_served_in_the_order_of_their_places_whatever_the_order_of_tasks(autojump_clock):
    cache, order = KvCache(50, PAGE), []
    queue = RoomQueue(SlotPool(50), cache)
    cache.on_available = queue.pump
    held, _ = cache.claim([], 0, 50)
    places = [queue.join() for _ in range(50)]
    for i in reversed(range(50)):  # the order of asking is not the order of the queue
        grant = places[i].grant
        places[i].grant = lambda room, i=i, grant=grant: (order.append(i), grant(room))
        places[i].ask(pages(1))
    assert order == []
    cache.release(held)
    assert order == list(range(50))


async def test_a_head_that_does_not_fit_is_not_overtaken_and_lets_the_next_in_when_it_times_out(
    cache, queue, autojump_clock
):
    held, _ = cache.claim([], 0, 2)
    claimed = trio.Event()

    async def head():
        with queue.join() as place, trio.move_on_after(2) as scope:
            await get(place, pages(3))
        assert scope.cancelled_caught

    async def small(place):
        with place:
            room = await get(place, pages(1))
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
            taken.append(await get(place, pages(2, slots=3)))

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
        await get(place, pages(2, slots=3))
    assert scope.cancelled_caught
    assert slots.used == 0
    cache.release(held)
    assert free(cache) == 4


async def test_a_wait_for_slots_takes_no_page_and_ends_when_all_of_them_are_free(cache, slots, queue, autojump_clock):
    held, got = slots.allocate(3), []

    async def waiter():
        with queue.join() as place:
            got.append(await get(place, pages(1, slots=2)))

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


async def test_a_place_that_has_not_asked_is_passed_and_comes_first_again_when_it_asks(
    cache, slots, queue, autojump_clock
):
    held, order = slots.allocate(4), []

    async def use(name, place):
        with place:
            room = await get(place, pages(1, slots=4))
            order.append(name)
            await trio.sleep(1)
            queue.give_back(room)

    reservation, later, last = queue.join(), queue.join(), queue.join()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(use, "later", later)
        nursery.start_soon(use, "last", last)
        await trio.testing.wait_all_tasks_blocked()
        slots.release(held)
        queue.pump()
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(use, "reservation", reservation)
    assert sorted(order[:1]) in (["last"], ["later"])
    assert order.index("reservation") == 1
    assert (free(cache), slots.used) == (4, 0)


async def test_a_place_left_without_asking_makes_way(cache, queue, autojump_clock):
    with queue.join():
        blocked = queue.join()
    with blocked, trio.fail_after(1):
        room = await get(blocked, pages(4))
    queue.give_back(room)
    assert free(cache) == 4


async def test_a_place_left_while_its_room_is_granted_and_not_taken_gives_it_to_the_next(
    cache, slots, queue, autojump_clock
):
    with queue.join() as first:
        first.ask(pages(4))
        second = queue.join()
        second.ask(pages(4))
        assert (free(cache), slots.used) == (0, 1)
    assert second.take() is not None


async def test_pages_that_become_shareable_let_the_head_in(autojump_clock):
    cache = KvCache(4, PAGE)
    queue = RoomQueue(SlotPool(4), cache)
    cache.on_available = queue.pump
    tokens = list(range(12))
    mine, _ = cache.claim(tokens, 12, 3)
    with queue.join() as place:
        place.ask(Wish(1, tokens, 12, 4))
        assert place.take() is None
        cache.insert(tokens, mine)
        room = place.take()
        assert (room.cached, room.pages[:3]) == (3, mine)
        queue.give_back(room)
    cache.release(mine)
    assert free(cache) == 4


async def test_slots_given_back_with_pages_that_stay_shared_let_the_next_in(cache, slots, queue, autojump_clock):
    tokens = list(range(8))
    mine, _ = cache.claim(tokens, 8, 2)
    cache.insert(tokens, mine)
    with queue.join() as first, queue.join() as second:
        first.ask(Wish(4, tokens, 8, 2))
        second.ask(Wish(1, tokens, 8, 2))
        room = first.take()
        queue.give_back(room)
        room = second.take()
        queue.give_back(room)
    cache.release(mine)
    assert (free(cache), slots.used) == (4, 0)
