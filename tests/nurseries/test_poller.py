from itertools import pairwise

import pytest
import trio

from pdserve.nurseries.poller import Poller


class Source:
    def __init__(self, progress=()):
        self.times = []
        self.progress = set(progress)

    async def poll(self):
        await trio.lowlevel.checkpoint()
        self.times.append(trio.current_time())
        return len(self.times) in self.progress

    @property
    def gaps(self):
        return [b - a for a, b in pairwise(self.times)]


@pytest.mark.parametrize("bad", [{"fast": 0}, {"fast": 2, "slow": 1}, {"grow": 1}, {"fast_cap": 0}])
def test_unusable_times(bad):
    with pytest.raises(ValueError, match="need"):
        Poller(poll=Source().poll, **bad)


@pytest.mark.trio
async def test_pauses_grow_up_to_slow_and_progress_resets_them(autojump_clock):
    source = Source(progress=[6])
    with trio.move_on_after(46) as scope:
        await Poller(poll=source.poll, fast=1, slow=10, grow=2).run()
    assert scope.cancelled_caught
    assert source.gaps == pytest.approx([1, 2, 4, 8, 10, 1, 2, 4, 8])


@pytest.mark.trio
async def test_steady_progress_is_steadily_fast(autojump_clock):
    source = Source(progress=range(1000))
    with trio.move_on_after(5.5):
        await Poller(poll=source.poll, fast=1, slow=10).run()
    assert source.gaps == pytest.approx([1] * 5)


@pytest.mark.trio
async def test_busy_caps_the_pause(autojump_clock):
    source = Source()
    poller = Poller(poll=source.poll, fast=1, slow=10, grow=2, fast_cap=2, busy=lambda: len(source.times) < 5)
    with trio.move_on_after(30):
        await poller.run()
    assert source.gaps == pytest.approx([1, 2, 2, 2, 10, 10])


@pytest.mark.trio
async def test_kick_polls_at_once_and_is_fast_again(autojump_clock):
    source = Source()
    poller = Poller(poll=source.poll, fast=1, slow=100, grow=100)
    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poller.run)
            await trio.sleep(50)
            poller.kick()
            poller.kick()
    assert source.gaps == pytest.approx([1, 49, 1])


@pytest.mark.trio
async def test_kick_during_a_poll_is_not_lost(autojump_clock):
    times = []

    async def poll():
        times.append(trio.current_time())
        await trio.sleep(1)
        if len(times) == 1:
            poller.kick()
        return False

    poller = Poller(poll=poll, fast=10, slow=10)
    with trio.move_on_after(13):
        await poller.run()
    assert [b - a for a, b in pairwise(times)] == pytest.approx([1, 11])


@pytest.mark.trio
async def test_kick_and_cancel_in_the_same_tick(autojump_clock):
    source = Source()
    poller = Poller(poll=source.poll, fast=1, slow=1)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poller.run)
            await trio.testing.wait_all_tasks_blocked()
            poller.kick()
            scope.cancel()
    assert scope.cancelled_caught
    assert len(source.times) == 1


@pytest.mark.trio
async def test_a_kick_in_every_poll_starves_nobody(autojump_clock):
    async def poll():
        poller.kick()
        return True

    poller = Poller(poll=poll)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poller.run)
            for _ in range(10):
                await trio.lowlevel.checkpoint()
            scope.cancel()
    assert scope.cancelled_caught


@pytest.mark.trio
async def test_a_failing_poll_ends_the_poller(autojump_clock):
    async def poll():
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        await Poller(poll=poll).run()
