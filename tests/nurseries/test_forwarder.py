import pytest
import trio
from trio_websocket import ConnectionClosed

from pdserve.nurseries.forwarder import Outbox, OutboxFull, forward


def make(**kwargs):
    return Outbox(encode=lambda frame: str(frame).encode(), **kwargs)


def join(old, new):
    return old + new


def drain(outbox):
    frames = []
    while (frame := outbox.take()) is not None:
        frames.append(frame)
    return frames


def test_control_first_data_by_first_insertion_merged_in_place():
    outbox = make()
    outbox.data("a", "a1", join)
    outbox.data("b", "b1", join)
    outbox.control("c1")
    outbox.data("a", "a2", join)
    outbox.control("c2")
    assert outbox.pending == 4
    assert drain(outbox) == [b"c1", b"c2", b"a1a2", b"b1"]
    assert outbox.pending == 0
    assert outbox.take() is None


def test_a_key_that_was_sent_starts_anew_at_the_end():
    outbox = make()
    outbox.data("a", "a1", join)
    outbox.data("b", "b1", join)
    assert outbox.take() == b"a1"
    outbox.data("a", "a2", join)
    assert drain(outbox) == [b"b1", b"a2"]


def test_discard():
    outbox = make()
    outbox.data("a", "a1", join)
    outbox.data("b", "b1", join)
    outbox.discard("a")
    outbox.discard("unknown")
    assert drain(outbox) == [b"b1"]


def test_a_failing_merge_is_the_callers_and_keeps_the_old_frame():
    outbox = make()
    outbox.data("a", "a1", join)
    with pytest.raises(ZeroDivisionError):
        outbox.data("a", "a2", lambda old, new: 1 / 0)
    assert drain(outbox) == [b"a1"]


def test_after_close_every_call_is_a_no_op():
    outbox = make()
    outbox.control("c")
    outbox.close()
    outbox.close()
    assert outbox.closed
    outbox.control("c")
    outbox.data("a", "a", join)
    outbox.discard("a")
    assert outbox.pending == 0
    assert outbox.take() is None


@pytest.mark.trio
async def test_writes_in_order_and_counts_bytes(open_sockets, autojump_clock):
    outbox = make()
    sent = []
    outbox.data("a", "data", join)
    outbox.control("control")
    async with open_sockets() as (ws, _, peer), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: forward(ws, outbox, on_sent=sent.append))
        assert await outbox.flush(5)
        outbox.control("later")
        await peer.wait_received(3)
        nursery.cancel_scope.cancel()
    assert peer.received == [b"control", b"data", b"later"]
    assert sent == [7, 4, 5]
    assert outbox.closed  # the writer is gone: so is the link


@pytest.mark.trio
async def test_merging_goes_on_until_the_moment_of_sending(open_sockets, autojump_clock):
    outbox = make()
    async with open_sockets() as (ws, stream, peer), trio.open_nursery() as nursery:
        nursery.start_soon(forward, ws, outbox)
        stream.stall()
        outbox.data("a", "1", join)
        await stream.stalled.wait()
        for digit in "234":
            outbox.data("a", digit, join)
        outbox.control("c")
        assert outbox.pending == 3
        stream.resume()
        await peer.wait_received(3)
        nursery.cancel_scope.cancel()
    assert peer.received == [b"1", b"c", b"234"]


@pytest.mark.parametrize("lane", ["control", "data"])
@pytest.mark.trio
async def test_over_its_bound_the_writer_raises_and_callers_do_not(open_sockets, autojump_clock, lane):
    outbox = make(control_limit=3, data_limit=3)

    def put(k):
        return outbox.control(k) if lane == "control" else outbox.data(k, k, join)

    for k in range(3):
        put(k)
    if lane == "data":
        outbox.data(2, 0, join)  # a merge needs no room
    for k in range(3, 6):
        put(k)
    assert outbox.pending == 3
    async with open_sockets() as (ws, _, _):
        with pytest.raises(OutboxFull, match="3"):
            await forward(ws, outbox)
    assert await outbox.settled()  # nothing was cut off: a close frame may follow
    assert not await outbox.flush(1)


@pytest.mark.trio
async def test_over_its_bound_in_the_middle_of_a_send(open_sockets, autojump_clock):
    """The usual way: the peer does not read, so the writer hangs, so the lane fills up."""
    outbox = make(control_limit=2)
    async with open_sockets() as (ws, stream, _):
        stream.stall()

        async def fill():
            outbox.control("first")
            await stream.stalled.wait()
            for _ in range(3):
                outbox.control("more")

        with pytest.RaisesGroup(OutboxFull), trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fill)
                nursery.start_soon(forward, ws, outbox)
        assert not await outbox.settled()  # half a frame is on the wire


@pytest.mark.trio
async def test_one_frame_that_takes_too_long_ends_the_writer_though_no_lane_is_full(open_sockets, autojump_clock):
    outbox = make()
    async with open_sockets() as (ws, stream, _):
        stream.stall()
        outbox.control("only one")
        began = trio.current_time()
        with pytest.raises(OutboxFull, match="within 6 s"):
            await forward(ws, outbox, timeout=6.0)
        assert trio.current_time() - began == pytest.approx(6.0)
        assert not await outbox.settled()


@pytest.mark.trio
async def test_encode_that_fails_ends_the_writer_not_the_caller(open_sockets, autojump_clock):
    outbox = Outbox(encode=lambda frame: 1 / frame)
    outbox.control(0)
    async with open_sockets() as (ws, _, _):
        with pytest.raises(ZeroDivisionError):
            await forward(ws, outbox)
    assert await outbox.settled()


@pytest.mark.trio
async def test_remote_close_ends_the_writer(open_sockets, autojump_clock):
    outbox = make()
    async with open_sockets() as (ws, _, peer):
        await peer.ws.aclose(1001)
        outbox.control("c")
        with pytest.raises(ConnectionClosed):
            await forward(ws, outbox)
    outbox.control("nobody sends this")
    assert outbox.pending == 0


@pytest.mark.trio
async def test_flush_of_nothing_is_immediate(autojump_clock):
    start = trio.current_time()
    assert await make().flush(5)
    assert trio.current_time() == start


@pytest.mark.trio
async def test_flush_times_out(autojump_clock):
    outbox = make()
    outbox.control("c")
    start = trio.current_time()
    assert not await outbox.flush(5)
    assert trio.current_time() - start == pytest.approx(5)
    assert outbox.pending == 1


@pytest.mark.trio
async def test_flush_waits_for_the_frame_that_is_being_sent(open_sockets, autojump_clock):
    outbox = make()
    async with open_sockets() as (ws, stream, _), trio.open_nursery() as nursery:
        nursery.start_soon(forward, ws, outbox)
        stream.stall()
        outbox.control("c")
        await stream.stalled.wait()
        assert not await outbox.flush(1)
        stream.resume()
        assert await outbox.flush(1)
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_flush_is_cancelled(autojump_clock):
    outbox = make()
    outbox.control("c")
    with trio.move_on_after(1) as scope:
        await outbox.flush(5)
    assert scope.cancelled_caught


@pytest.mark.trio
async def test_flush_ends_when_the_outbox_is_closed_or_emptied(autojump_clock):
    for end, whole in ((Outbox.close, False), (lambda outbox: outbox.discard("a"), True)):
        outbox = make()
        outbox.data("a", "a", join)
        results = []

        async def flush(outbox=outbox, results=results):
            results.append(await outbox.flush(5))

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            await trio.testing.wait_all_tasks_blocked()
            end(outbox)
        assert results == [whole]
        assert trio.current_time() == start


@pytest.mark.trio
async def test_flush_written_and_cancelled_in_the_same_tick(autojump_clock):
    outbox = make()
    outbox.control("c")
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.flush, 5)
            await trio.testing.wait_all_tasks_blocked()
            outbox.take()
            scope.cancel()
    assert outbox.pending == 0
    assert await outbox.flush(0)


@pytest.mark.trio
async def test_flush_written_in_the_tick_of_its_timeout(autojump_clock):
    """Which comes first is open; the answer is true either way."""
    for _ in range(20):
        outbox = make()
        outbox.control("c")

        async def take(outbox=outbox):
            await trio.sleep(5)
            outbox.take()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            assert await outbox.flush(5) is (outbox.pending == 0)
