"""One WebSocket connection: reader, writer, heartbeat and children live and die together."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import trio
from trio_websocket import ConnectionClosed

from pdserve.errors import FatalError, ProtocolError
from pdserve.nurseries.forwarder import OutboxFull, forward
from pdserve.nurseries.groups import leaves
from pdserve.nurseries.heartbeat import PeerSilent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio_websocket import WebSocketConnection

    from pdserve.nurseries.forwarder import Outbox
    from pdserve.nurseries.heartbeat import Heartbeat

log = logging.getLogger(__name__)

# RFC 6455 §7.4.1
NORMAL, GOING_AWAY, PROTOCOL, POLICY, INTERNAL, TRY_LATER = 1000, 1001, 1002, 1008, 1011, 1013
MAX_REASON_BYTES = 123


class ConnectionLost(Exception):
    """A connection ended, and not because this side asked for it.

    The first failure is the `__cause__`, the others are notes. `code` is the close code that the peer sent, if any.
    `internal`: a bug of this side is among the failures, log it.
    """

    def __init__(self, reason: str, *, code: int | None = None, internal: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.internal = internal


_EXPECTED = (ConnectionClosed, ProtocolError, PeerSilent, OutboxFull, ConnectionLost)


class Connection:
    """What the body of `connection_scope` gets."""

    def __init__(self, ws: WebSocketConnection, name: str, nursery: trio.Nursery) -> None:
        self.name = name
        self.nursery = nursery
        """The children. One that fails ends the connection."""
        self.closed = trio.Event()
        """The socket is closed, the tasks have ended."""
        self._ws = ws
        self._failures: list[BaseException] = []  # as they happened
        self._asked: tuple[int, str] | None = None  # set: this side wants to leave
        self._closing = False

    def start_soon(self, fn: Callable[..., Awaitable[object]], *args: Any, name: str | None = None) -> None:  # noqa: ANN401
        """Start a child."""
        self.nursery.start_soon(self._guard, fn, *args, name=fn if name is None else name)

    def close(self, code: int, reason: str) -> None:
        """Leave the scope cleanly: what is queued is still written (bounded), then the peer is told code and reason.

        The body and the children are cancelled, no `ConnectionLost` is raised. Only the first call counts, and none
        after a failure.
        """
        if not self._failures and self._asked is None:
            self._asked = (code, reason)
        self.nursery.cancel_scope.cancel()

    async def _guard(self, fn: Callable[..., Awaitable[object]], *args: object) -> None:
        try:
            await fn(*args)
        except Exception as exc:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        for leaf in leaves(exc):
            # Once this side is leaving, it does not matter that the peer does so too.
            gone = isinstance(leaf, ConnectionClosed) and (self._asked is not None or self._closing)
            if not gone and leaf not in self._failures:
                self._failures.append(leaf)
        self.nursery.cancel_scope.cancel()

    def _farewell(self, cancelled: bool) -> tuple[int, str]:
        """Code and reason for the peer."""
        if not self._failures:
            return self._asked or ((GOING_AWAY, "going away") if cancelled else (NORMAL, ""))
        match self._failures[0]:
            case ProtocolError() as exc:
                return PROTOCOL, str(exc)
            case PeerSilent() as exc:
                return POLICY, str(exc)
            case OutboxFull() as exc:
                return TRY_LATER, str(exc)
            case _:
                return INTERNAL, "internal error"

    async def _discard(self) -> None:
        """A full receive queue stops close frames too: read on until the socket is closed."""
        try:
            while True:
                await self._ws.get_message()
        except ConnectionClosed:
            pass

    async def _shut(self, outbox: Outbox, timeout: float, cancelled: bool) -> None:
        """Close the socket, politely if that is possible within `timeout`. Never writes behind half a frame."""
        self._closing = True
        try:
            with trio.move_on_after(timeout, shield=True):
                async with trio.open_nursery() as closing:
                    closing.start_soon(self._discard, name=f"{self.name}.discard")
                    if not self._failures:
                        await outbox.flush(timeout / 2)
                    outbox.close()
                    whole = await outbox.settled()
                    if self._ws.closed is None:
                        if whole:
                            code, reason = self._farewell(cancelled)
                            await self._ws.aclose(code, _truncate(reason))
                        closing.cancel_scope.cancel()
                    # Otherwise the peer closed first: `_discard` returns when it has had its answer.
        finally:
            outbox.close()
            # `ws.aclose` leaves the stream open when the peer has closed first, or has sent too large a message.
            await trio.aclose_forcefully(self._ws._stream)

    def _raise(self, others: list[BaseException]) -> None:
        """Raise the one exception that this connection's end comes to, if any.

        Order: exits of the process, FatalError, cancellation from outside, then everything else as ConnectionLost.
        """
        failures = self._failures
        for exc in others:
            if not isinstance(exc, trio.Cancelled):
                raise exc
        for exc in failures:
            if isinstance(exc, FatalError):
                raise exc
        internal = any(not isinstance(exc, _EXPECTED) for exc in failures)
        if others:
            if internal:
                log.error("%s failed while it was cancelled: %r", self.name, failures[0], exc_info=failures[0])
            raise others[0]
        if not failures:
            return
        first, *rest = failures
        lost = ConnectionLost(_describe(first), code=_peer_code(first), internal=internal)
        for exc in rest:
            if not isinstance(exc, ConnectionClosed):
                lost.add_note(f"also: {exc!r}")
        raise lost from first


@asynccontextmanager
async def connection_scope(
    ws: WebSocketConnection,
    *,
    name: str,
    on_message: Callable[[bytes | str], None],
    outbox: Outbox,
    heartbeat: Heartbeat,
    send_ping: Callable[[], None],
    close_timeout: float = 2.0,
    on_sent: Callable[[int], None] | None = None,
) -> AsyncIterator[Connection]:
    """Run a connection around the body; reader, writer, heartbeat, children and body live and die together.

    It is left with the socket closed and all its tasks ended, at most `close_timeout` seconds after the last child:
    - body returns, or `Connection.close`: children cancelled, outbox flushed, close frame 1000 or the code asked for;
    - any failure, also the peer's close: everything is cancelled, `ConnectionLost` from the first failure. A
      ProtocolError (say, raised by `on_message`) is told to the peer with code 1002, anything unexpected with 1011;
    - cancelled from outside: outbox flushed, close frame 1001, `Cancelled` goes on.
    A FatalError passes through as it is, and so does what ends the process. A frame is never cut off while the
    connection lives: the writer is cancelled only after the socket was closed.

    `on_message` is synchronous and must be quick; every message counts as a heartbeat first. `on_sent`: see `forward`.
    A frame that cannot be written within the heartbeat's patience is a failure too: silence is found from both ends.
    """
    others: list[BaseException] = []  # Cancelled from outside, KeyboardInterrupt and the like
    connection: Connection | None = None

    async def read() -> NoReturn:
        while True:
            message = await ws.get_message()
            heartbeat.beat()
            on_message(message)

    async def write(guard: Callable[..., Awaitable[None]]) -> None:
        with writer:
            await guard(lambda: forward(ws, outbox, timeout=heartbeat.patience, on_sent=on_sent))

    # Shielded: an outer cancel must not tear a frame, and children may still queue frames while they clean up. It ends
    # in the `finally` below, whatever happens.
    writer = trio.CancelScope(shield=True)
    try:
        async with trio.open_nursery() as outer:
            try:
                async with trio.open_nursery() as nursery:
                    connection = Connection(ws, name, nursery)
                    outer.start_soon(write, connection._guard, name=f"{name}.writer")
                    connection.start_soon(read, name=f"{name}.reader")
                    connection.start_soon(heartbeat.run, send_ping, name=f"{name}.heartbeat")
                    yield connection
                    # A body that ends because of a cancel need not say so.
                    await trio.lowlevel.checkpoint_if_cancelled()
                    connection.close(NORMAL, "")
            except BaseException as exc:
                _sort(exc, connection, others)
            assert connection is not None
            try:
                await connection._shut(outbox, close_timeout, bool(others))
            finally:
                writer.cancel()
    except BaseException as exc:
        _sort(exc, connection, others)
    finally:
        if connection is not None:
            connection.closed.set()
    if connection is not None:
        connection._raise(others)


def _sort(exc: BaseException, connection: Connection | None, others: list[BaseException]) -> None:
    """Failures go to the connection, in order; what is no `Exception` goes to `others`."""
    for leaf in leaves(exc):
        if connection is None or not isinstance(leaf, Exception):
            others.append(leaf)
        else:
            connection._fail(leaf)


def _describe(exc: BaseException) -> str:
    if isinstance(exc, ConnectionClosed):
        if exc.reason is None:
            return "connection broken"
        return f"closed by peer: {exc.reason.code} {exc.reason.reason or exc.reason.name}"
    if isinstance(exc, _EXPECTED):
        return str(exc)
    return f"internal error: {exc!r}"


def _peer_code(exc: BaseException) -> int | None:
    return exc.reason.code if isinstance(exc, ConnectionClosed) and exc.reason is not None else None


def _truncate(reason: str) -> str:
    """What fits into a close frame, cut between characters."""
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")
