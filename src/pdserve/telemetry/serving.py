"""An ASGI app on sockets of our own: hypercorn's protocols, in a server loop that outlives a failed connection."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.config import Config
from hypercorn.events import Updated
from hypercorn.logging import Logger
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from pdserve.errors import ConfigError
from pdserve.telemetry.listener import Listener, address_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from hypercorn.events import Event
    from hypercorn.typing import ResponseSummary, WWWScope

log = logging.getLogger("pdserve.http")

_PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Asked for all the time by machines: in the access log at level debug only."""


async def serve_asgi(
    app: Any,  # noqa: ANN401 - an ASGI 3 callable; Starlette's and hypercorn's types of it differ
    sockets: Sequence[socket.socket],
    *,
    stop: trio.Event,
    graceful: float,
    certfile: str | None = None,
    keyfile: str | None = None,
    max_header_bytes: int = 64 * 1024,
    keep_alive: float = 60.0,
    unsent: float = 1.0,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve HTTP/1.1 and HTTP/2 until `stop`, then return once the responses in flight are done.

    Owns `sockets` from the call on and closes them. `task_status` gets the URLs once connections are accepted.
    After `stop` nothing is accepted, idle connections close, responses get `graceful` seconds, then are aborted;
    connections without a request that has come in whole are looked for, and closed, every `unsent` seconds of these.
    `keep_alive` (seconds) also bounds how long a client may take to send its request headers.
    An exception in one connection is logged and ends that connection only. There is no ASGI lifespan.
    Raises ConfigError when the certificate cannot be used.
    """
    config = _config(certfile, keyfile, max_header_bytes, keep_alive)
    try:
        tls = config.create_ssl_context()
    except OSError as error:  # ssl.SSLError is one
        for sock in sockets:
            sock.close()
        raise ConfigError(f"cannot use the TLS certificate {certfile} with key {keyfile}: {error}") from error
    plain = [Listener(sock) for sock in sockets]
    listeners: list[Listener] | list[trio.SSLListener[trio.SocketStream]] = (
        plain if tls is None else [trio.SSLListener(one, tls, https_compatible=True) for one in plain]
    )
    urls = [f"{'http' if tls is None else 'https'}://{address_of(sock)}" for sock in sockets]
    connections = _Connections(app, config)
    async with trio.open_nursery() as handlers:
        try:
            async with trio.open_nursery() as accepting:
                accept = partial(trio.serve_listeners, connections.serve, handler_nursery=handlers)
                await accepting.start(accept, listeners)
                task_status.started(urls)
                await stop.wait()
                accepting.cancel_scope.cancel()
            await connections.context.terminated.set()
            with trio.move_on_after(graceful):
                while connections.open:
                    with trio.move_on_after(unsent):
                        await connections.idle()
                    connections.abort_unsent()
        finally:
            connections.abort()
            handlers.cancel_scope.cancel()


class _Connections:
    """Every open connection of one server, so that those that outlive the grace can be aborted."""

    def __init__(self, app: Any, config: Config) -> None:  # noqa: ANN401
        self.context = WorkerContext(None)
        self._app = app
        self._config = config
        self.open: dict[trio.SocketStream, _Server] = {}
        self._idle = trio.Event()

    async def serve(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        """One connection from accept to close; the border at which its unexpected failures are logged."""
        transport = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
        server = self.open[transport] = _Server(self._app, self._config, self.context, stream)
        try:
            await server
        except trio.ClosedResourceError:
            pass  # closed below, in the middle of the TLS handshake
        except Exception:
            log.exception("an HTTP connection failed")
        finally:
            transport.socket.close()
            server.dissolve()
            del self.open[transport]
            if not self.open:
                self._idle.set()

    async def idle(self) -> None:
        """Return when no connection is open. Only meaningful once nothing is accepted any more."""
        while self.open:
            self._idle = trio.Event()
            await self._idle.wait()

    def abort_unsent(self) -> None:
        """Close the sockets of connections that have nothing to be answered."""
        for transport, server in self.open.items():
            if not server.answering:
                transport.socket.close()

    def abort(self) -> None:
        """Close every socket at once. This also ends hypercorn's shielded sends, which no cancellation reaches."""
        for transport in self.open:
            transport.socket.close()


class _Server(TCPServer):
    """hypercorn's server of one connection, which would keep the socket of a client that has closed it for as long as
    an idle client may take: with clients that close after each answer, a minute's worth of file descriptors.
    """

    _closed = False
    """By the client: from then on the connection is not idle but over."""

    def __init__(
        self,
        app: Any,  # noqa: ANN401
        config: Config,
        context: WorkerContext,
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
    ) -> None:
        wrapped = wrap_app(self._call, 0, "asgi")
        # hypercorn types the stream as TLS only, and handles both.
        super().__init__(wrapped, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]
        self._asgi = app
        self._requests: set[_Request] = set()

    @property
    def answering(self) -> bool:
        """Whether the app works on a request that has come in whole."""
        return not all(request.unsent for request in self._requests)

    def dissolve(self) -> None:
        """To be called when it has ended: the ring of references through hypercorn's objects would keep some thirty of
        them for each connection until the garbage collector comes, which it does rarely.
        """
        for name in ("app", "protocol"):
            vars(self).pop(name, None)  # there is no protocol before the TLS handshake

    async def _call(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:  # noqa: ANN401
        request = _Request(receive)
        self._requests.add(request)
        try:
            await self._asgi(scope, request.receive, send)
        finally:
            self._requests.discard(request)

    async def protocol_send(self, event: Event) -> None:
        if not (self._closed and isinstance(event, Updated)):
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        self._closed = True
        await self.idle_task.stop()


class _Request:
    """What one request has come to; `receive` is ASGI's."""

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self._receive = receive
        self._asked = self._whole = False

    @property
    def unsent(self) -> bool:
        """Whether the app wants its body, and has not got all of it."""
        return self._asked and not self._whole

    async def receive(self) -> Any:  # noqa: ANN401
        self._asked = True
        message = await self._receive()
        self._whole = self._whole or not message.get("more_body", False)
        return message


def _config(certfile: str | None, keyfile: str | None, max_header_bytes: int, keep_alive: float) -> Config:
    config = Config()
    config.alpn_protocols = ["h2", "http/1.1"]
    config.certfile, config.keyfile = certfile, keyfile
    config.h11_max_incomplete_size = max_header_bytes
    config.h2_max_header_list_size = max_header_bytes
    config.h2_max_concurrent_streams = 1000
    config.keep_alive_timeout = keep_alive  # declared int, used as a duration
    config.keep_alive_max_requests = 10_000
    config.ssl_handshake_timeout = 10
    config.include_server_header = False
    config.errorlog = log
    config.accesslog = logging.getLogger("pdserve.http.access")
    config.logger_class = _Log
    return config


class _Log(Logger):
    """One short access line a response: neither headers nor query strings, which may hold secrets."""

    async def access(self, request: WWWScope, response: ResponseSummary | None, request_time: float) -> None:
        # hypercorn reports a connection that closes right behind its response twice, first without the response.
        quiet = response is None or request["path"] in _PROBES
        level = logging.DEBUG if quiet else logging.INFO
        if self.access_logger is None or not self.access_logger.isEnabledFor(level):
            return
        client = request.get("client")
        status = response["status"] if response is not None else "client gone"
        method = request["method"] if request["type"] == "http" else "WEBSOCKET"
        self.access_logger.log(
            level, '%s "%s %s" %s %.3fs', client[0] if client else "-", method, request["path"], status, request_time
        )
