"""A client that closes its connection gets it closed at once, not when the keep-alive time is over."""

from contextlib import asynccontextmanager

import h2.config
import h2.connection
import pytest
import trio
import trio.testing

from pdserve.telemetry.listener import open_listener
from pdserve.telemetry.serving import serve_asgi

pytestmark = pytest.mark.trio

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def dialled(*, answering=True):
    """A connection to a server with a keep-alive of an hour; it answers, or waits with that for the client to leave."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        while not answering:
            if (await receive())["type"] == "http.disconnect":
                return
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})

    listener, stop = open_listener("127.0.0.1", 0, user_timeout=30), trio.Event()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:

            async def serve(task_status):
                await serve_asgi(app, [listener], stop=stop, graceful=1, keep_alive=3600, task_status=task_status)

            await nursery.start(serve)
            async with await trio.open_tcp_stream(*listener.getsockname()[:2]) as stream:
                yield stream
            stop.set()


async def until_closed(stream):
    with trio.fail_after(3):
        return b"".join([chunk async for chunk in stream])


async def test_before_any_request():
    async with dialled() as stream:
        await stream.send_eof()
        assert await until_closed(stream) == b""


async def test_after_an_answer():
    async with dialled() as stream:
        await stream.send_all(REQUEST)
        answer = b""
        while not answer.endswith(b"ok"):
            answer += await stream.receive_some()
        await trio.testing.wait_all_tasks_blocked()
        await stream.send_eof()
        assert await until_closed(stream) == b""


async def test_right_behind_a_request():
    async with dialled() as stream:
        await stream.send_all(REQUEST)
        await stream.send_eof()
        await until_closed(stream)


async def test_in_the_middle_of_an_answer():
    async with dialled(answering=False) as stream:
        await stream.send_all(REQUEST)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        await stream.send_eof()
        assert await until_closed(stream) == b""


@pytest.mark.parametrize("answering", [True, False])
async def test_http2(answering):
    async with dialled(answering=answering) as stream:
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        head = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
        client.send_headers(client.get_next_available_stream_id(), head, end_stream=True)
        await stream.send_all(client.data_to_send())
        assert await stream.receive_some()
        await trio.testing.wait_all_tasks_blocked()
        await stream.send_eof()
        await until_closed(stream)
