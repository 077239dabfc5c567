"""Places in the queue for pages: order of drawing, success, timeout, cancel, grant and cancel in one tick."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from pdserve.engine.radix import KvCache
from pdserve.worker.page_queue import PageQueue

pytestmark = pytest.mark.trio

PAGE = 4


@pytest.fixture
def cache():
    return KvCache(4, PAGE)


@pytest.fixture
def queue(cache):
    queue = PageQueue(cache)
    cache.on_available = queue.pump
    return queue


def free(cache: KvCache) -> int:
    cache.check_integrity()
    return cache.available


async def test_pages_that_are_there_are_claimed_without_a_checkpoint(cache, queue, autojump_clock):
    with queue.join() as place, trio.CancelScope() as scope:
        scope.cancel()
        pages, cached = await place.claim([1, 2, 3], 3, 2)
    assert (len(pages), cached) == (2, 0)
    assert free(cache) == 2
    cache.release(pages)
    assert free(cache) == 4


async def test_cached_pages_come_first(cache, queue, autojump_clock):
    tokens = list(range(8))
    with queue.join() as place:
        pages, _ = await place.claim(tokens, 8, 2)
    cache.insert(tokens, pages)
    cache.release(pages)
    with queue.join() as place:
        again, cached = await place.claim(tokens, 7, 3)
    assert (again[0], cached) == (pages[0], 1)


async def test_a_place_drawn_earlier_is_served_earlier_though_it_asks_later(cache, queue, autojump_clock):
    order = []
    with queue.join() as first, queue.join() as second:

        async def ask(name, place):
            pages, _ = await place.claim([1], 1, 3)
            order.append(name)
            cache.release(pages)

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
            await place.claim([1], 1, 3)
        assert scope.cancelled_caught

    async def small(place):
        with place:
            pages, _ = await place.claim([1], 1, 1)
            claimed.set()
            cache.release(pages)

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
async def test_grant_and_cancel_in_one_tick_lose_no_page(cache, queue, grant_first, autojump_clock):
    held, _ = cache.claim([], 0, 4)
    scope, taken = trio.CancelScope(), []

    async def waiter():
        with scope, queue.join() as place:
            taken.extend((await place.claim([1], 1, 2))[0])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiter)
        await trio.testing.wait_all_tasks_blocked()
        steps = [lambda: cache.release(held), scope.cancel]
        for step in steps if grant_first else reversed(steps):
            step()
    cache.release(taken)
    assert free(cache) == 4


async def test_a_place_left_without_asking_makes_way(cache, queue, autojump_clock):
    with queue.join():
        blocked = queue.join()
    with blocked, trio.fail_after(1):
        pages, _ = await blocked.claim([1], 1, 4)
    cache.release(pages)
    assert free(cache) == 4


async def test_fifty_places_freed_at_once_are_taken_in_order(autojump_clock):
    cache = KvCache(50, PAGE)
    queue = PageQueue(cache)
    cache.on_available = queue.pump
    held, _ = cache.claim([], 0, 50)
    order = []

    async def ask(i, place):
        with place:
            await place.claim([1], 0, 1)
            order.append(i)

    async with trio.open_nursery() as nursery:
        for i in range(50):
            nursery.start_soon(ask, i, queue.join())
        await trio.testing.wait_all_tasks_blocked()
        cache.release(held)
    assert order == list(range(50))
