"""READs from their queue to their end, abandoned ones included: in virtual time, with real bytes."""

from __future__ import annotations

import pytest
import trio

from pdserve.errors import TransferError
from transfer.failing import fails

pytestmark = pytest.mark.trio

PAGES = 16


async def test_nothing_to_read_is_over_at_once(autojump_clock, pair):
    hold = pair.p.hold(2)
    pull = pair.d.pull(hold, skip=2)
    await pull.wait()
    assert pull.abandon() is False
    assert pair.p.ends == []
    hold.end("released")
    hold.end("link")
    assert pair.p.ends == ["released"]
    await pair.quiescent()


@pytest.mark.failure(2)
@pytest.mark.parametrize("land_early", [False, True])
async def test_pages_of_an_abandoned_read_stay_in_quarantine_until_it_is_terminal(autojump_clock, pair, land_early):
    pair.network.delay = 5
    pair.network.land_early = land_early
    pull = pair.d.pull(pair.p.hold(3))
    with trio.move_on_after(2) as cancelled:
        await pull.wait()
    assert cancelled.cancelled_caught
    assert pull.abandon() is True
    assert pull.abandon() is True
    assert pair.d.owner.stats().quarantined == pair.d.cache.counts().quarantined == 3
    assert pair.d.cache.available == PAGES - 3
    await trio.sleep(2.5)
    assert (pair.d.page(pull.local[0])[0] != 0) == land_early
    assert pair.d.owner.stats().running == 1
    await trio.sleep(1)
    assert pair.d.cache.available == PAGES
    assert pair.d.page(pull.local[2])[0] == 3  # an abort does not stop the bytes
    with pytest.raises(TransferError, match=r"abandoned|stale"):
        await pull.wait()
    await pair.quiescent()


async def test_delayed_read_counts_as_in_flight(autojump_clock, new_pair):
    pair = await new_pair(delay=4).start()
    pair.introduce()
    hold = pair.p.hold()
    pull = pair.d.pull(hold)
    await trio.sleep(1)
    assert pull.abandon() is True
    await trio.sleep(2.5)
    assert pair.d.owner.stats().quarantined == 3
    await trio.sleep(1)
    assert pair.d.cache.available == PAGES
    assert not hold.ended  # nobody wants the pages any more: they were not read in the end
    hold.end("released")
    other = pair.d.pull(pair.p.hold(2))
    started = trio.current_time()
    await other.wait()
    assert 4 <= trio.current_time() - started < 4.1
    pair.d.cache.release(other.local)
    await pair.quiescent()


async def test_abandoning_before_the_post_keeps_the_pages(autojump_clock, new_pair):
    pair = await new_pair().start()
    pull = pair.d.pull(pair.p.hold(timeout=1))
    assert pull.abandon() is False
    with pytest.raises(TransferError, match="abandoned"):
        await pull.wait()
    pair.introduce()
    await trio.sleep(1)
    assert pair.d.page(pull.local[0])[0] == 0
    pair.d.cache.release(pull.local)
    await pair.quiescent()


async def test_transfer_timeout_leaves_the_pages_with_the_owner(autojump_clock, pair):
    pair.network.delay = 40
    pull = pair.d.pull(pair.p.hold(timeout=50))
    assert await fails(pull, TransferError, "did not end within 30 s") is True
    await trio.sleep(15)
    await pair.quiescent()


async def test_failed_read(autojump_clock, pair):
    pair.network.fail_next(TransferError("broken"))
    hold = pair.p.hold()
    pull = pair.d.pull(hold)
    assert await fails(pull, TransferError, "broken") is False
    assert pair.d.page(pull.local[0])[0] == 0
    again = pair.d.pull(hold)  # the hold still lives
    await again.wait()
    pair.d.cache.release([*pull.local, *again.local])
    await pair.quiescent()


async def test_failure_seam(autojump_clock, new_pair):
    pair = await new_pair(fail=iter([True, False]).__next__).start()
    pair.introduce()
    hold = pair.p.hold()
    pull = pair.d.pull(hold)
    assert await fails(pull, TransferError, "on purpose") is False
    again = pair.d.pull(hold)
    await again.wait()
    pair.d.cache.release([*pull.local, *again.local])
    await pair.quiescent()


async def test_a_read_that_begins_as_its_peer_is_reported_gone_keeps_the_peer(autojump_clock, pair):
    await trio.sleep(0.2)
    pair.d.owner.peer_down("link", "p", "life1")
    pull = pair.d.pull(pair.p.hold())
    with trio.fail_after(1):
        await pull.wait()
    await trio.sleep(0.2)
    assert pair.d.owner.stats().peers == 0
    pair.d.cache.release(pull.local)
    await pair.quiescent()
