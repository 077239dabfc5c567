"""Opening a WebSocket to a Master at one address; trust is about the name in the URL."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import trio
from trio_websocket import WebSocketConnection, wrap_client_stream

from pdserve.errors import ConfigError
from pdserve.wire.codec import MAX_FRAME_BYTES, RECEIVE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

_RECEIVE_QUEUE = 256
"""Messages buffered by the WebSocket layer: a full queue would stop close and pong processing."""

Dial = Callable[[trio.Nursery], Awaitable[WebSocketConnection]]
"""Opens a WebSocket whose own tasks live in the nursery."""


def dialler(url: str, ca: Path | None) -> Callable[[str], Dial]:
    """For `url`, ws:// or wss://: how to dial it at an address, an IP literal.

    The Host header and the certificate (verified against `ca`, or the system's authorities) are about the URL's host,
    wherever its address came from. The dial raises OSError where there is no connection or no trust. Raises ConfigError
    for a `ca` that cannot be used.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    name = f"[{host}]" if ":" in host else host
    resource = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    context = _context(ca) if parts.scheme == "wss" else None

    def at(address: str) -> Dial:
        async def dial(nursery: trio.Nursery) -> WebSocketConnection:
            tcp = await trio.open_tcp_stream(address, port)
            try:
                stream = tcp if context is None else await _trusted(tcp, context, host)
                return await wrap_client_stream(
                    nursery,
                    stream,
                    f"{name}:{port}",
                    resource,
                    message_queue_size=_RECEIVE_QUEUE,
                    max_message_size=MAX_FRAME_BYTES,
                    receive_buffer_size=RECEIVE_BYTES,
                )
            except BaseException:  # nobody else has the stream yet
                await trio.aclose_forcefully(tcp)
                raise

        return dial

    return at


def _context(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"cannot use --link-ca {ca}: {error}") from error


async def _trusted(tcp: trio.SocketStream, context: ssl.SSLContext, host: str) -> trio.SSLStream[trio.SocketStream]:
    """Shake hands here, where a failure has a reason: inside the WebSocket layer it would be a silent timeout."""
    stream = trio.SSLStream(tcp, context, server_hostname=host, https_compatible=True)
    try:
        await stream.do_handshake()
    except trio.BrokenResourceError as error:
        raise ConnectionError(f"TLS: {error.__cause__ or error}") from error
    return stream
