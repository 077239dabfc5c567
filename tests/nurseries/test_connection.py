import logging
from contextlib import asynccontextmanager

import pytest
import trio
from trio_websocket import ConnectionClosed, open_websocket, serve_websocket

from pdserve.errors import FatalError, ProtocolError
from pdserve.nurseries.connection import ConnectionLost, connection_scope
from pdserve.nurseries.forwarder import Outbox, OutboxFull
from pdserve.nurseries.heartbeat import Heartbeat, PeerSilent


class Link:
    """A connection with everything it needs; `messages` are what the peer sent."""

    def __init__(self, ws, stream, peer):
        self.ws, self.stream, self.peer = ws, stream, peer
        self.messages = []
        self.outbox = Outbox(control_limit=4, encode=lambda frame: str(frame).encode())
        self.heartbeat = Heartbeat(1, 10)
        self.on_message = self.messages.append
        self.connection = None

    @asynccontextmanager
    async def open(self, **kwargs):
        async with connection_scope(
            self.ws,
            name="link",
            on_message=lambda message: self.on_message(message),
            outbox=self.outbox,
            heartbeat=self.heartbeat,
            send_ping=lambda: None,
            **kwargs,
        ) as self.connection:
            yield self.connection


@pytest.fixture
async def link(open_sockets):
    async with open_sockets() as parts:
        yield Link(*parts)


async def hang():
    await trio.sleep_forever()


def fails_with(exc):
    async def fail():
        await trio.lowlevel.checkpoint()
        raise exc

    return fail


def ended(link):
    """Nothing of the connection is left."""
    assert link.connection.closed.is_set()
    assert link.outbox.closed
    assert not link.connection.nursery.child_tasks
    return True


@pytest.mark.trio
async def test_messages_both_ways_and_a_clean_end(link, autojump_clock):
    async with link.open():
        link.outbox.control("hello")
        await link.peer.ws.send_message(b"from peer")
        await link.peer.ws.send_message("text")
        await link.peer.wait_received(1)
        await trio.testing.wait_all_tasks_blocked()
        assert link.messages == [b"from peer", "text"]
        link.outbox.control("last words")  # still written: leaving flushes
    await link.peer.wait_closed()
    assert link.peer.received == [b"hello", b"last words"]
    assert link.peer.code == 1000
    assert ended(link)


@pytest.mark.trio
async def test_every_message_is_a_beat_before_it_is_handled(link, autojump_clock):
    silences = []
    link.on_message = lambda message: silences.append(link.heartbeat.silence)
    async with link.open():
        await trio.sleep(5)
        assert link.heartbeat.silence == pytest.approx(5)
        await link.peer.ws.send_message(b"x")
        await trio.testing.wait_all_tasks_blocked()
    assert silences == [0]


@pytest.mark.trio
async def test_on_sent(link, autojump_clock):
    sizes = []
    async with link.open(on_sent=sizes.append):
        link.outbox.control("four")
    assert sizes == [4]


@pytest.mark.trio
async def test_close_leaves_the_scope_with_code_and_reason(link, autojump_clock):
    cancelled = []

    async def child():
        try:
            await hang()
        finally:
            link.outbox.control("from the child's clean-up")
            cancelled.append(True)

    async with link.open() as connection:
        connection.start_soon(child)
        await trio.testing.wait_all_tasks_blocked()
        link.outbox.control("queued")
        connection.close(4001, "replaced")
        connection.close(4002, "too late")
        await hang()
    await link.peer.wait_closed()
    assert (link.peer.code, link.peer.reason) == (4001, "replaced")
    assert link.peer.received == [b"queued", b"from the child's clean-up"]
    assert cancelled == [True]
    assert ended(link)


@pytest.mark.trio
async def test_close_from_on_message_stops_reading(link, autojump_clock):
    def on_message(message):
        link.messages.append(message)
        link.connection.close(1000, "")

    link.on_message = on_message
    async with link.open():
        for k in range(3):
            await link.peer.ws.send_message(str(k))
        await hang()
    assert link.messages == ["0"]


@pytest.mark.trio
async def test_remote_close_is_a_loss_with_the_peers_code_and_reason(link, autojump_clock):
    start = trio.current_time()
    with pytest.raises(ConnectionLost) as caught:
        async with link.open() as connection:
            connection.start_soon(hang)
            await link.peer.ws.aclose(4003, "you again")
            await hang()
    lost = caught.value
    assert (lost.code, lost.internal) == (4003, False)
    assert "4003 you again" in lost.reason
    assert isinstance(lost.__cause__, ConnectionClosed)
    assert trio.current_time() == start  # at once
    assert ended(link)


@pytest.mark.trio
async def test_remote_close_delivers_what_was_sent_before_it(link, autojump_clock):
    with pytest.raises(ConnectionLost):
        async with link.open():
            await link.peer.ws.send_message("1")
            await link.peer.ws.aclose()
            await hang()
    assert link.messages == ["1"]


@pytest.mark.trio
async def test_socket_cut_without_a_close_frame(link, autojump_clock):
    with pytest.raises(ConnectionLost) as caught:
        async with link.open():
            await trio.aclose_forcefully(link.peer.ws._stream)
            await hang()
    assert caught.value.code == 1006
    assert ended(link)


@pytest.mark.trio
async def test_malformed_message_is_1002_with_its_reason_for_the_peer(link, autojump_clock):
    reason = "bad tag " + "é" * 100

    def on_message(message):
        raise ProtocolError(reason)

    link.on_message = on_message
    with pytest.raises(ConnectionLost) as caught:
        async with link.open():
            await link.peer.ws.send_message(b"\xff")
            await hang()
    await link.peer.wait_closed()
    assert link.peer.code == 1002
    assert link.peer.reason == "bad tag " + "é" * 57  # 123 bytes at most, whole characters
    assert caught.value.reason == reason
    assert not caught.value.internal
    assert ended(link)


@pytest.mark.trio
async def test_bug_in_on_message_is_internal_and_not_told_to_the_peer(link, autojump_clock):
    link.on_message = lambda message: {}["secret"]
    with pytest.raises(ConnectionLost) as caught:
        async with link.open():
            await link.peer.ws.send_message(b"x")
            await hang()
    await link.peer.wait_closed()
    assert (link.peer.code, link.peer.reason) == (1011, "internal error")
    assert caught.value.internal
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.trio
async def test_silent_peer(link, autojump_clock):
    start = trio.current_time()
    with pytest.raises(ConnectionLost, match="silent") as caught:
        async with link.open():
            await hang()
    assert isinstance(caught.value.__cause__, PeerSilent)
    assert not caught.value.internal
    assert trio.current_time() - start == pytest.approx(10)
    await link.peer.wait_closed()
    assert link.peer.code == 1008


@pytest.mark.trio
async def test_silent_peer_that_does_not_answer_the_close_either(open_sockets, autojump_clock):
    async with open_sockets(reading=False) as parts:
        link = Link(*parts)
        # The peer's process hangs: its end of the stream is not read at all.
        link.stream.stall()
        start = trio.current_time()
        with pytest.raises(ConnectionLost, match="silent"):
            async with link.open(close_timeout=2):
                await hang()
        assert trio.current_time() - start == pytest.approx(12)
        assert ended(link)


@pytest.mark.trio
async def test_outbox_full_is_told_to_the_peer(link, autojump_clock):
    with pytest.raises(ConnectionLost) as caught:
        async with link.open():
            for k in range(5):
                link.outbox.control(k)
            await hang()
    assert isinstance(caught.value.__cause__, OutboxFull)
    await link.peer.wait_closed()
    assert link.peer.code == 1013


@pytest.mark.trio
async def test_outbox_full_while_the_writer_hangs_tears_the_frame_and_says_nothing_more(link, autojump_clock):
    with pytest.raises(ConnectionLost):
        async with link.open():
            link.stream.stall()
            link.outbox.control("x" * 1000)
            await link.stream.stalled.wait()
            torn = len(link.stream.sent)
            for k in range(5):
                link.outbox.control(k)
            await hang()
    assert len(link.stream.sent) == torn  # no close frame behind half a frame
    await link.peer.wait_closed()
    assert link.peer.code == 1006
    assert link.peer.received == []
    assert ended(link)


@pytest.mark.trio
async def test_failing_child_ends_the_connection_and_its_siblings(link, autojump_clock):
    ends = []

    async def sibling():
        try:
            await hang()
        finally:
            ends.append("sibling")

    bug = ValueError("child")
    with pytest.raises(ConnectionLost, match="child") as caught:
        async with link.open() as connection:
            connection.start_soon(sibling, name="sibling")
            connection.start_soon(fails_with(bug))
            try:
                await hang()
            finally:
                ends.append("body")
    assert caught.value.__cause__ is bug
    assert caught.value.internal
    assert sorted(ends) == ["body", "sibling"]
    assert ended(link)


@pytest.mark.trio
async def test_child_started_directly_in_the_nursery(link, autojump_clock):
    bug = ValueError("child")
    with pytest.raises(ConnectionLost) as caught:
        async with link.open() as connection:
            connection.nursery.start_soon(fails_with(bug))
            await hang()
    assert caught.value.__cause__ is bug


@pytest.mark.trio
async def test_child_that_returns_ends_nothing(link, autojump_clock):
    async with link.open() as connection:
        connection.start_soon(trio.sleep, 1)
        await trio.sleep(5)


@pytest.mark.trio
async def test_failing_body(link, autojump_clock):
    bug = ValueError("body")
    with pytest.raises(ConnectionLost) as caught:
        async with link.open():
            await trio.sleep(1)
            raise bug
    assert caught.value.__cause__ is bug
    assert ended(link)


@pytest.mark.parametrize("victim", ["reader", "writer", "heartbeat"])
@pytest.mark.trio
async def test_killing_a_sibling(link, autojump_clock, victim):
    """Each of the own tasks, failing in its own way, takes everything with it at once."""

    def fail(*_):
        raise RuntimeError(victim)

    if victim == "writer":
        link.outbox._encode = fail
    start = trio.current_time()
    with pytest.raises(ConnectionLost, match=victim) as caught:
        async with connection_scope(
            link.ws, name="link", on_message=fail, outbox=link.outbox, heartbeat=link.heartbeat, send_ping=fail
        ) as link.connection:
            link.connection.start_soon(hang)
            if victim == "reader":
                await link.peer.ws.send_message(b"x")
            elif victim == "writer":
                link.outbox.control("x")
            await hang()
    assert caught.value.internal
    assert trio.current_time() - start == pytest.approx(1 if victim == "heartbeat" else 0)
    assert ended(link)


@pytest.mark.trio
async def test_several_failures_are_one_loss_with_notes(link, autojump_clock):
    async def fails_late():
        try:
            await hang()
        finally:
            raise KeyError("in the clean-up")

    with pytest.raises(ConnectionLost, match="first") as caught:
        async with link.open() as connection:
            connection.start_soon(fails_late)
            connection.start_soon(fails_with(ValueError("first")))
            await hang()
    assert any("in the clean-up" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("where", ["body", "child", "on_message"])
@pytest.mark.trio
async def test_fatal_error_passes_through(link, autojump_clock, where):
    fatal = FatalError("the GPU hangs")

    def on_message(message):
        raise fatal

    link.on_message = on_message
    with pytest.raises(FatalError) as caught:
        async with link.open() as connection:
            if where == "child":
                connection.start_soon(fails_with(fatal))
            elif where == "on_message":
                await link.peer.ws.send_message(b"x")
            else:
                raise fatal
            await hang()
    assert caught.value is fatal
    assert ended(link)


@pytest.mark.trio
async def test_system_exit_passes_through(link, autojump_clock):
    with pytest.raises(SystemExit):
        async with link.open() as connection:
            connection.start_soon(fails_with(SystemExit(3)))
            await hang()
    assert ended(link)


@pytest.mark.trio
async def test_cancelled_from_outside_says_1001_and_passes(link, autojump_clock):
    with trio.move_on_after(3) as scope:
        async with link.open() as connection:
            connection.start_soon(hang)
            await trio.sleep(1)
            link.outbox.control("x")
            await hang()
    assert scope.cancelled_caught
    await link.peer.wait_closed()
    assert link.peer.code == 1001
    assert link.peer.received == [b"x"]
    assert ended(link)


@pytest.mark.trio
async def test_cancelled_in_the_middle_of_a_frame_finishes_the_frame(link, autojump_clock):
    with trio.CancelScope() as scope:
        async with link.open():
            link.stream.stall()
            link.outbox.control("x" * 1000)
            await link.stream.stalled.wait()
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def later():
                    with trio.CancelScope(shield=True):
                        await trio.sleep(0.5)
                        link.stream.resume()

                scope.cancel()
    assert scope.cancelled_caught
    await link.peer.wait_closed()
    assert link.peer.code == 1001
    assert link.peer.received == [b"x" * 1000]


@pytest.mark.trio
async def test_cancelled_while_the_peer_does_not_read_is_bounded(link, autojump_clock):
    start = trio.current_time()
    with trio.move_on_after(3) as scope:
        async with link.open(close_timeout=2):
            link.stream.stall()
            link.outbox.control("x" * 1000)
            await hang()
    assert scope.cancelled_caught
    assert trio.current_time() - start == pytest.approx(5)
    assert ended(link)


@pytest.mark.trio
async def test_cancelled_while_it_closes(link, autojump_clock):
    """The outer cancel comes during the bounded, shielded close: it passes afterwards."""
    with trio.move_on_after(1) as scope:
        async with link.open(close_timeout=2):
            link.stream.stall()
            link.outbox.control("x" * 1000)
            await link.stream.stalled.wait()
    assert ended(link)
    assert scope.cancel_called


@pytest.mark.trio
async def test_cancelled_and_malformed_message_in_the_same_tick(link, autojump_clock, caplog):
    scope = trio.CancelScope()

    def on_message(message):
        scope.cancel()
        raise ProtocolError("bad")

    link.on_message = on_message
    with scope:
        async with link.open():
            await link.peer.ws.send_message(b"x")
            await hang()
    assert scope.cancelled_caught
    await link.peer.wait_closed()
    assert link.peer.code == 1002
    assert not caplog.records  # the peer's fault, no bug
    assert ended(link)


@pytest.mark.trio
async def test_cancelled_and_failed_in_the_same_tick_is_logged(link, autojump_clock, caplog):
    async def child():
        try:
            await hang()
        finally:
            raise ValueError("in the clean-up")

    with caplog.at_level(logging.ERROR), trio.CancelScope() as scope:
        async with link.open() as connection:
            connection.start_soon(child)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await hang()
    assert scope.cancelled_caught
    assert "in the clean-up" in caplog.text


@pytest.mark.trio
async def test_own_close_and_the_peers_close_in_the_same_tick_is_clean(link, autojump_clock):
    async with link.open() as connection:
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.peer.ws.aclose, 1000)
            connection.close(1000, "")
    assert ended(link)


@pytest.mark.trio
async def test_close_after_a_failure_does_not_hide_it(link, autojump_clock):
    async def child():
        try:
            await hang()
        finally:
            link.connection.close(1000, "")

    with pytest.raises(ConnectionLost):
        async with link.open() as connection:
            connection.start_soon(child)
            await link.peer.ws.aclose(1001)
            await hang()


@pytest.mark.trio
async def test_a_flooding_peer_does_not_block_the_close(link, autojump_clock):
    """The receive queue holds one message: leaving goes on reading, or the close frame would never be seen."""
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def flood():
            try:
                while True:
                    await link.peer.ws.send_message(b"x" * 100)
            except ConnectionClosed:
                pass

        async with link.open():
            while len(link.messages) < 50:
                await trio.lowlevel.checkpoint()
    await link.peer.wait_closed()
    assert link.peer.code == 1000


@pytest.mark.trio
async def test_message_too_big(link, autojump_clock):
    with pytest.raises(ConnectionLost) as caught:
        async with link.open():
            link.ws._max_message_size = 10
            await link.peer.ws.send_message(b"x" * 11)
            await hang()
    assert caught.value.code == 1009
    await link.peer.wait_closed()
    assert link.peer.code == 1009


@pytest.mark.trio
async def test_task_names(link, autojump_clock):
    async with link.open() as connection:
        connection.start_soon(hang, name="child")
        connection.start_soon(hang)
        names = {task.name for task in connection.nursery.child_tasks}
        assert {"link.reader", "link.heartbeat", "child"} < names
        assert any(name.endswith("hang") for name in names)


@pytest.mark.trio
async def test_both_ends_over_tcp_and_a_bad_client_harms_no_other():
    ends, both_ended = [], trio.Event()

    def parts():
        return {
            "outbox": Outbox(encode=lambda frame: frame),
            "heartbeat": Heartbeat(5, 15),
            "send_ping": lambda: None,
        }

    async def handler(request):
        ws = await request.accept()
        server = parts()

        def echo(message):
            if message == b"bad":
                raise ProtocolError("bad frame")
            server["outbox"].control(message)

        try:
            async with connection_scope(ws, name="server", on_message=echo, **server):
                await hang()
        except ConnectionLost as exc:
            ends.append(exc.reason)
            if len(ends) == 2:
                both_ended.set()

    async def client(messages):
        got, all_there = [], trio.Event()

        def on_message(message):
            got.append(message)
            if len(got) == len(messages):
                all_there.set()

        client = parts()
        async with (
            open_websocket("127.0.0.1", server.port, "/", use_ssl=False) as ws,
            connection_scope(ws, name="client", on_message=on_message, **client) as connection,
        ):
            for message in messages:
                client["outbox"].control(message)
            await all_there.wait()
            connection.close(4000, "had enough")
        return got

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server = await nursery.start(serve_websocket, handler, "127.0.0.1", 0, None)
            with pytest.raises(ConnectionLost, match="1002 bad frame"):
                await client([b"fine", b"bad"])
            big = [bytes([k]) * 200_000 for k in range(20)]
            assert await client(big) == big
            await both_ended.wait()
            nursery.cancel_scope.cancel()
    assert ends == ["bad frame", "closed by peer: 4000 had enough"]
