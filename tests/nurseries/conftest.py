"""Real WebSocket connections over in-memory streams, in virtual time."""

from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import memory_stream_pair
from trio_websocket import ConnectionClosed, wrap_client_stream, wrap_server_stream


class StallableStream(trio.abc.Stream):
    """A stream whose sending can be stopped half-way through a chunk, like a peer that no longer reads."""

    def __init__(self, stream):
        self.stream = stream
        self.flow = trio.Event()
        self.flow.set()
        self.stalled = trio.Event()  # a send has begun and hangs
        self.sent = bytearray()

    async def send_all(self, data):
        if not self.flow.is_set():
            half = len(data) // 2
            await self._send(data[:half])
            self.stalled.set()
            await self.flow.wait()
            data = data[half:]
        await self._send(data)

    async def _send(self, data):
        self.sent += data
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self):
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes=None):
        return await self.stream.receive_some(max_bytes)

    async def aclose(self):
        await self.stream.aclose()

    def stall(self):
        self.flow = trio.Event()

    def resume(self):
        self.flow.set()


class Peer:
    """The other end: reads everything, notes it and how the connection ended."""

    def __init__(self, ws):
        self.ws = ws
        self.received = []
        self.closed = trio.Event()
        self.code = None
        self.reason = None
        self.arrival = trio.Event()

    async def read(self):
        try:
            while True:
                self.received.append(await self.ws.get_message())
                self.arrival.set()
                self.arrival = trio.Event()
        except ConnectionClosed as exc:
            self.code, self.reason = exc.reason.code, exc.reason.reason
        self.closed.set()

    async def wait_received(self, count):
        with trio.fail_after(60):
            while len(self.received) < count:
                await self.arrival.wait()

    async def wait_closed(self):
        with trio.fail_after(60):
            await self.closed.wait()


@asynccontextmanager
async def sockets(*, reading=True):
    """(own WebSocket, its stream, the peer). The own side is the server unless turned round by the caller."""
    client_stream, server_stream = memory_stream_pair()
    stream = StallableStream(client_stream)
    async with trio.open_nursery() as nursery:
        requests = []

        async def serve():
            requests.append(await wrap_server_stream(nursery, server_stream))
            requests.append(await requests[0].accept())

        async with trio.open_nursery() as handshake:
            handshake.start_soon(serve)
            ws = await wrap_client_stream(nursery, stream, "test", "/")
        peer = Peer(requests[1])
        if reading:
            nursery.start_soon(peer.read)
        yield ws, stream, peer
        nursery.cancel_scope.cancel()


@pytest.fixture
def open_sockets():
    return sockets
