"""The one writer of a socket, and the bounded outbox that everybody else hands frames to.

Nobody but the writer ever waits for the socket: `control` and `data` are synchronous and return at once. A peer that
reads too slowly costs the link, never a caller: when a lane is over its bound the writer raises `OutboxFull`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from trio_websocket import WebSocketConnection


class OutboxFull(Exception):
    """A lane is over its bound, or a frame takes too long to write: the peer does not read fast enough.

    Raised in the writer, ends the connection."""


class Outbox:
    """Frames that wait for the writer, in two lanes.

    `control` is FIFO and always goes first. `data` holds at most one frame per key, merged while it waits, FIFO by
    first insertion. `encode` runs at the moment of sending, so merging goes on until then. A frame over `control_limit`
    frames or `data_limit` keys is dropped and fails the outbox. Once it has failed or is closed, every call is a no-op.
    """

    def __init__(
        self, *, control_limit: int = 1024, data_limit: int = 65536, encode: Callable[[Any], bytes | str]
    ) -> None:
        self._control_limit = control_limit
        self._data_limit = data_limit
        self._encode = encode
        self._control: deque[Any] = deque()
        self._data: dict[Hashable, Any] = {}
        self._failure: OutboxFull | None = None
        self._closed = False
        self._lost = False  # closed with something unwritten
        self._sending = False  # a frame is on its way; stays True when its send was cut off
        self._send_scope: trio.CancelScope | None = None
        self._wake = trio.Event()  # for the writer
        self._written = trio.Event()  # nothing is queued or being sent, or never will be
        self._written.set()
        self._quiet = trio.Event()  # no frame is being sent
        self._quiet.set()

    def control(self, frame: object) -> None:
        """Queue a frame ahead of all data."""
        if self._dead:
            return
        if len(self._control) >= self._control_limit:
            self._fail(f"more than {self._control_limit} control frames are waiting")
            return
        self._control.append(frame)
        self._queued()

    def data(self, key: Hashable, frame: Any, merge: Callable[[Any, Any], Any]) -> None:  # noqa: ANN401
        """Queue a frame; if one of this key still waits, `merge(old, new)` takes its place."""
        if self._dead:
            return
        if key in self._data:
            self._data[key] = merge(self._data[key], frame)
            return
        if len(self._data) >= self._data_limit:
            self._fail(f"data of more than {self._data_limit} keys is waiting")
            return
        self._data[key] = frame
        self._queued()

    def discard(self, key: Hashable) -> None:
        """Forget the waiting data of a key, if there is any."""
        self._data.pop(key, None)
        self._check_written()

    def close(self) -> None:
        """Drop everything that waits; a frame that is being sent is left to the writer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._lost = self._sending or self.pending > 0
        self._control.clear()
        self._data.clear()
        self._wake.set()
        self._written.set()

    @property
    def pending(self) -> int:
        """Frames that are queued or being sent."""
        return len(self._control) + len(self._data) + (not self._quiet.is_set())

    @property
    def closed(self) -> bool:
        return self._closed

    async def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all that is queued has been written. False: it was not."""
        with trio.move_on_after(timeout):
            await self._written.wait()
        return not self._lost if self._closed else not self.pending

    def take(self) -> bytes | str | None:
        """The next frame, encoded; None when nothing waits. For tests without a socket."""
        encoded = self._pop()
        self._check_written()
        return encoded

    async def settled(self) -> bool:
        """Wait until no frame is being sent. False: one was cut off, the stream must not be written to again.

        For closing, after `close()`. The caller bounds it.
        """
        await self._quiet.wait()
        return not self._sending

    @property
    def _dead(self) -> bool:
        return self._closed or self._failure is not None

    def _queued(self) -> None:
        self._wake.set()
        if self._written.is_set():
            self._written = trio.Event()

    def _check_written(self) -> None:
        if not self.pending:
            self._written.set()

    def _fail(self, why: str) -> None:
        self._failure = OutboxFull(why)
        self._wake.set()
        if self._send_scope is not None:
            # The writer is most likely stuck in this very send. The frame may be torn: the connection ends with it.
            self._send_scope.cancel()

    def _pop(self) -> bytes | str | None:
        if self._control:
            return self._encode(self._control.popleft())
        if self._data:
            return self._encode(self._data.pop(next(iter(self._data))))
        return None

    async def _next(self) -> bytes | str:
        while True:
            if self._failure is not None:
                raise self._failure
            frame = self._pop()
            if frame is not None:
                return frame
            self._wake = trio.Event()
            await self._wake.wait()

    async def _send(self, ws: WebSocketConnection, frame: bytes | str, timeout: float) -> None:
        # Only a completed send clears `_sending`: after any other end the stream may hold half a frame.
        self._sending = True
        self._quiet = trio.Event()
        try:
            with trio.CancelScope(deadline=trio.current_time() + timeout) as self._send_scope:
                await ws.send_message(frame)
                self._sending = False
        finally:
            self._send_scope = None
            self._quiet.set()
        if self._sending and self._failure is None:
            self._fail(f"a frame could not be written within {timeout:g} s")
        self._check_written()


async def forward(
    ws: WebSocketConnection,
    outbox: Outbox,
    *,
    timeout: float = math.inf,
    on_sent: Callable[[int], None] | None = None,
) -> NoReturn:
    """Write the outbox to the socket, one frame at a time; the only task that does so.

    Never returns: it is cancelled together with the connection. However it ends, the outbox is closed. `on_sent` is
    told the length of every frame written. Raises OutboxFull, also when one frame takes longer than `timeout` seconds,
    ConnectionClosed, and whatever `encode` raises.
    """
    try:
        while True:
            frame = await outbox._next()
            await outbox._send(ws, frame, timeout)
            if on_sent is not None and not outbox._sending:
                on_sent(len(frame))
    finally:
        outbox.close()
