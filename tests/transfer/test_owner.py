"""The owner in virtual time, with real bytes copied between two nodes of one process."""

from __future__ import annotations

import msgspec
import pytest
import trio

from pdserve.errors import FatalError, PeerDisconnectedError, TransferError
from pdserve.transfer.agent import KvHandle
from pdserve.transfer.memory_agent import MemoryAgent, MemoryNetwork
from pdserve.transfer.pull import Note, encode_note
from pdserve.wire.metadata import sign
from transfer.failing import fails

pytestmark = pytest.mark.trio


PAGES = 16


async def test_pages_arrive_and_the_hold_ends_as_pulled(autojump_clock, pair):
    hold = pair.p.hold(4)
    pull = pair.d.pull(hold, skip=1)
    with trio.fail_after(1):
        await pull.wait()
        await pull.wait()  # asking again changes nothing
    assert [pair.d.page(page)[0] for page in pull.local] == [2, 3, 4]
    assert pair.p.ends == ["pulled"]
    assert hold.ended
    assert pull.abandon() is False
    pair.d.cache.release(pull.local)
    await pair.quiescent()


@pytest.mark.failure(3)
async def test_replay_of_a_consumed_handle_is_stale(autojump_clock, pair):
    hold = pair.p.hold()
    first = pair.d.pull(hold)
    await first.wait()
    second = pair.d.pull(hold)
    assert await fails(second, TransferError, "stale") is False
    pair.d.cache.release([*first.local, *second.local])
    await pair.quiescent()


async def test_unknown_hold_is_stale(autojump_clock, pair):
    hold = pair.p.hold()
    handle = msgspec.structs.replace(msgspec.msgpack.decode(hold.handle, type=KvHandle), hold=10**6)
    local = pair.d.cache.allocate(3)
    assert await fails(pair.d.owner.start_pull(handle, 0, local), TransferError, "stale") is False
    assert pair.p.ends == []
    hold.end("released")
    pair.d.cache.release(local)
    await pair.quiescent()


@pytest.mark.failure(23)
async def test_hold_expires_without_traffic_and_can_be_renewed(autojump_clock, pair):
    hold = pair.p.hold(timeout=10)
    other = pair.p.hold(timeout=15)
    await trio.sleep(6)
    hold.renew()
    await trio.sleep(8)
    assert pair.p.ends == []
    await trio.sleep(1.5)
    assert pair.p.ends == ["expired"]
    assert (hold.ended, other.ended) == (False, True)
    await trio.sleep(1)
    assert pair.p.ends == ["expired", "expired"]
    hold.renew()
    await pair.quiescent()


async def test_expiry_during_the_read_makes_it_stale(autojump_clock, pair):
    pair.network.delay = 3
    hold = pair.p.hold(timeout=2)
    pull = pair.d.pull(hold)
    assert await fails(pull, TransferError, "stale") is False
    assert pair.p.ends == ["expired"]
    pair.d.cache.release(pull.local)
    await pair.quiescent()


async def test_abandoning_while_confirming_keeps_the_pages(autojump_clock, pair):
    pair.network.drop = lambda sender, _receiver, _note: sender.startswith("p")
    pull = pair.d.pull(pair.p.hold())
    await trio.sleep(1)
    assert pull.abandon() is False
    pair.d.cache.release(pull.local)
    await pair.quiescent()


@pytest.mark.parametrize("lost", ["d", "p"])
async def test_lost_confirmation_times_out(autojump_clock, pair, lost):
    pair.network.drop = lambda sender, _receiver, _note: sender.startswith(lost)
    hold = pair.p.hold(timeout=20)
    pull = pair.d.pull(hold)
    started = trio.current_time()
    assert await fails(pull, TransferError, "did not confirm") is False
    assert trio.current_time() - started == pytest.approx(5, abs=0.1)
    pair.d.cache.release(pull.local)
    hold.end("released")
    assert pair.p.ends == (["released"] if lost == "d" else ["pulled"])
    await pair.quiescent()


@pytest.mark.failure(5)
async def test_disconnect_fails_all_pulls_at_once_and_frees_abandoned_pages(autojump_clock, pair):
    pair.network.delay = 10
    pulls = [pair.d.pull(pair.p.hold(2)) for _ in range(3)]
    await trio.sleep(1)
    assert pulls[0].abandon() is True
    pair.network.disconnect("p-life1")
    started = trio.current_time()
    for pull in pulls[1:]:
        assert await fails(pull, PeerDisconnectedError, "gone") is False
        pair.d.cache.release(pull.local)
    assert trio.current_time() - started < 0.1
    await trio.sleep(0.1)
    stats = pair.d.owner.stats()
    assert (stats.running, stats.quarantined, stats.peers) == (0, 0, 0)

    # The same life comes back: admitted again on demand.
    pair.network.reconnect("p-life1")
    pair.network.delay = 0
    again = pair.d.pull(pair.p.hold(2))
    await again.wait()
    pair.d.cache.release(again.local)
    await trio.sleep(30)
    await pair.quiescent()


async def test_peer_that_dies_while_it_should_confirm_is_found_out(autojump_clock, pair):
    pair.network.drop = lambda sender, _receiver, _note: sender.startswith("d")
    pull = pair.d.pull(pair.p.hold(timeout=1))
    await trio.sleep(0.1)
    pair.network.disconnect("p-life1")
    started = trio.current_time()
    assert await fails(pull, PeerDisconnectedError, "gone") is False
    assert trio.current_time() - started < 0.5
    pair.d.cache.release(pull.local)
    await trio.sleep(1)
    await pair.quiescent()


async def test_answer_is_sent_again_after_a_lost_connection(autojump_clock, pair):
    """P finds its connection to D broken although D lives: it admits D again and answers."""
    notify, broken = pair.p.agent.notify, iter([True, False])

    def flaky(peer, note):
        if next(broken, False):
            raise PeerDisconnectedError("broken")
        notify(peer, note)

    pair.p.agent.notify = flaky
    pull = pair.d.pull(pair.p.hold())
    with trio.fail_after(1):
        await pull.wait()
    pair.d.cache.release(pull.local)
    await pair.quiescent()


async def test_unknown_peer_is_waited_for(autojump_clock, new_pair):
    pair = await new_pair().start()
    pull = pair.d.pull(pair.p.hold())
    late = pair.d.pull(pair.p.hold())
    await trio.sleep(4)
    assert late.abandon() is False
    pair.d.cache.release(late.local)
    pair.d.owner.peer_up("link", "p", pair.p.owner.metadata)  # P hears of D only after D's question
    await trio.sleep(0.5)
    assert pair.p.ends == []
    pair.p.owner.peer_up("link", "d", pair.d.owner.metadata)
    await pull.wait()
    pair.d.cache.release(pull.local)
    await trio.sleep(30)
    await pair.quiescent()


@pytest.mark.failure(8)
async def test_peer_that_is_never_reported(autojump_clock, new_pair):
    pair = await new_pair().start()
    pull = pair.d.pull(pair.p.hold(timeout=30))
    assert await fails(pull, TransferError, "was not admitted within 5 s") is False
    pair.d.owner.peer_up("link", "p", pair.p.owner.metadata)
    again = pair.d.pull(pair.p.hold(timeout=30))
    assert await fails(again, TransferError, "did not confirm") is False  # to P, D is a stranger
    pair.d.cache.release([*pull.local, *again.local])
    assert pair.p.ends == []
    await trio.sleep(30)
    assert pair.p.ends == ["expired", "expired"]
    await pair.quiescent()


async def test_refused_peer_fails_its_pulls_at_once(autojump_clock, new_pair):
    pair = await new_pair().start()
    pull = pair.d.pull(pair.p.hold(timeout=1))
    pair.d.owner.peer_up("link", "p", sign("p-life1", b"garbage", "secret"))
    assert await fails(pull, TransferError, "cannot be reached") is False
    pair.d.cache.release(pull.local)
    await trio.sleep(1)
    await pair.quiescent()


async def test_forged_metadata_is_ignored(autojump_clock, pair, caplog):
    good = pair.p.owner.metadata
    for bad in (
        sign(good.agent, good.blob, "another token"),
        msgspec.structs.replace(good, blob=good.blob[:-1]),
        msgspec.structs.replace(good, agent="p-life2"),
        msgspec.structs.replace(good, mac=b""),
    ):
        pair.d.owner.peer_up("link", "p", bad)
        assert "another cluster token" in caplog.messages.pop()
        caplog.clear()
    pair.d.owner.peer_up("link", "d", pair.d.owner.metadata)  # its own: of no interest
    await trio.sleep(1)
    assert pair.d.owner.stats().peers == 1


async def test_peers_go_with_the_last_link_that_reports_them(autojump_clock, pair):
    await trio.sleep(0.2)
    owner = pair.d.owner
    owner.peer_up("other", "p", pair.p.owner.metadata)
    owner.link_lost("link")
    await trio.sleep(0.2)
    assert owner.stats().peers == 1
    owner.peer_down("other", "p", "another life")
    await trio.sleep(0.2)
    assert owner.stats().peers == 1
    pair.network.delay = 3
    pull = pair.d.pull(pair.p.hold())
    await trio.sleep(0.2)
    owner.peer_down("other", "p", "life1")
    await trio.sleep(1)
    assert owner.stats().peers == 1  # a hint only: the transfer in flight comes first
    with trio.fail_after(5):
        await pull.wait()
    await trio.sleep(0.2)
    assert owner.stats().peers == 0
    pair.d.cache.release(pull.local)
    await pair.quiescent()


@pytest.mark.parametrize(
    ("changes", "skip", "local", "match"),
    [
        ({"page_bytes": 128}, 0, [0, 1, 2], "pages of 128 bytes"),
        ({}, 1, [0, 1, 2], "skipped"),
        ({}, 0, [0, 1], "skipped"),
        ({}, -1, [0], "skipped"),
        ({"pages": (0, -1, 2)}, 0, [0, 1, 2], "impossible"),
        ({"pages": (0, 1 << 60, 2)}, 0, [0, 1, 2], "impossible"),
        ({"address": -5}, 0, [0, 1, 2], "impossible"),
        ({}, 0, [0, 1, PAGES], "outside of the pool"),
    ],
)
async def test_handles_that_do_not_fit_are_refused(autojump_clock, pair, changes, skip, local, match):
    handle = msgspec.msgpack.decode(pair.p.hold().handle, type=KvHandle)
    with pytest.raises(TransferError, match=match):
        pair.d.owner.start_pull(msgspec.structs.replace(handle, **changes), skip, local)
    assert pair.d.owner.stats().running == 0


async def test_pages_that_the_peer_has_not_registered(autojump_clock, pair):
    handle = msgspec.msgpack.decode(pair.p.hold().handle, type=KvHandle)
    local = pair.d.cache.allocate(3)
    pull = pair.d.owner.start_pull(msgspec.structs.replace(handle, pages=(0, 1, PAGES)), 0, local)
    assert await fails(pull, TransferError, "not registered") is False


async def test_garbage_and_forged_notes_are_ignored(autojump_clock, pair, new_node, nursery):
    third = new_node("x", pair.network)
    await nursery.start(third.owner.run)
    third.agent.add_peer(pair.p.owner.metadata.blob)
    third.agent.add_peer(pair.d.owner.metadata.blob)
    hold = pair.p.hold()
    pair.network.drop = lambda sender, _receiver, _note: sender.startswith("p")
    for note in (b"", b"\xc1", b"\x93\xa4done", msgspec.msgpack.encode(["what", 1, 2])):
        third.agent.notify("p-life1", note)
    third.agent.notify("p-life1", encode_note(Note("done", hold.id, 1)))  # no Master has reported x
    pull = pair.d.pull(pair.p.hold())
    await trio.sleep(1)
    third.agent.notify("d-life1", encode_note(Note("valid", pull.handle.hold, pull.nonce)))  # not x's to answer
    third.agent.notify("d-life1", encode_note(Note("valid", pull.handle.hold, 5)))
    assert await fails(pull, TransferError, "did not confirm") is False
    assert not hold.ended
    hold.end("released")


async def test_quarantine_over_its_limit_is_told_and_the_pages_stay_there(autojump_clock, new_pair, nursery):
    pair = new_pair()
    await nursery.start(pair.p.owner.run)
    await nursery.start(pair.d.owner.run)
    pair.network.delay = 10_000
    pair.introduce()
    pull = pair.d.pull(pair.p.hold(5))
    await trio.sleep(1)
    assert pull.abandon()
    began = trio.current_time()
    with trio.fail_after(10):
        assert "5 of 16 KV pages" in await pair.d.owner.wait_unfit()
    assert trio.current_time() - began >= 5
    assert pair.d.owner.stats().quarantined == 5


async def test_end_of_the_owner_settles_everything(autojump_clock, new_pair, nursery):
    pair = new_pair()
    await nursery.start(pair.p.owner.run)
    async with trio.open_nursery() as inner:
        await inner.start(pair.d.owner.run)
        pair.introduce()
        pair.network.delay = 100
        running, abandoned = pair.d.pull(pair.p.hold(2)), pair.d.pull(pair.p.hold(2))
        own = pair.d.hold(1)
        await trio.sleep(1)
        pair.d.owner.link_lost("link")
        unknown = pair.d.owner.start_pull(
            msgspec.structs.replace(running.handle, agent="nobody"), 0, pair.d.cache.allocate(2)
        )
        assert abandoned.abandon() is True
        inner.cancel_scope.cancel()
    for pull in (running, unknown):
        with pytest.raises(TransferError, match="closed"):
            await pull.wait()
        assert pull.abandon() is False  # the agent is destroyed: nothing can land
        pair.d.cache.release(pull.local)
    assert own.ended
    assert pair.d.ends == ["released"]
    assert pair.d.cache.available == PAGES
    pair.d.cache.check_integrity()
    with pytest.raises(TransferError, match="closed"):
        pair.d.pull(own)
    with pytest.raises(TransferError, match="closed"):
        pair.d.hold(1)


class BrokenAgent(MemoryAgent):
    """Fails in one of its calls."""

    broken = ""
    error: Exception = RuntimeError("a bug")

    def register(self, address, nbytes, device):
        self.check("register")
        super().register(address, nbytes, device)

    def notifications(self):
        self.check("notifications")
        return super().notifications()

    def check(self, name):
        if self.broken == name:
            raise self.error


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    ("broken", "error", "match"),
    [
        ("register", TransferError("no memory"), "cannot be registered: no memory"),
        ("notifications", RuntimeError("a bug"), "NIXL call notifications failed: .*a bug"),
        ("notifications", TransferError("no notes"), "cannot be read"),
    ],
)
async def test_broken_agent_ends_the_process(new_node, broken, error, match, threaded):
    node = new_node("p", MemoryNetwork(), threaded=threaded)
    node.owner._agent = agent = BrokenAgent("p-life1", MemoryNetwork())
    agent.broken, agent.error = broken, error
    expected = pytest.RaisesExc(FatalError, match=match)
    with pytest.RaisesGroup(expected, flatten_subgroups=True), trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.owner.run)
