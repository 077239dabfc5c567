"""Listening TCP sockets: how they are opened, and how they accept when the process has no descriptor left."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket

import trio

from pdserve.errors import ConfigError

log = logging.getLogger("pdserve.listener")

_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY = 0.1
"""Seconds between two tries to accept while there is no room."""
_WARN_EVERY = 10.0


def open_listener(host: str, port: int, *, user_timeout: float | None, backlog: int = 1024) -> socket.socket:
    """A listening TCP socket; port 0 lets the system choose.

    `user_timeout` (seconds) is inherited by accepted connections: a peer that acknowledges or reads nothing for that
    long is cut by the kernel, even while a send to it is shielded. Raises ConfigError naming host and port.
    """
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise ConfigError(f"cannot listen on {_address(host, port)}: no such port")
    listener: socket.socket | None = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if user_timeout is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(user_timeout * 1000)))
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen on {_address(host, port)}: {error}") from error
    listener.setblocking(False)
    return listener


def address_of(sock: socket.socket) -> str:
    """`host:port` of a bound TCP socket as URLs and people have it: an IPv6 address in brackets."""
    return _address(*sock.getsockname()[:2])


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Listener(trio.abc.Listener[trio.SocketStream]):
    """Accepts from an open socket, which it owns. Without room for another connection it waits until there is some.

    Connections wait in the backlog meanwhile. A warning says so, one line every ten seconds at most.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        self._warned = -math.inf

    async def accept(self) -> trio.SocketStream:
        """The next connection. Raises what a closed or broken listening socket raises."""
        while True:
            try:
                return await self._listener.accept()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                if trio.current_time() - self._warned >= _WARN_EVERY:
                    self._warned = trio.current_time()
                    log.warning("cannot accept connections for now, they wait: %s", os.strerror(error.errno))
            await trio.sleep(_RETRY)

    async def aclose(self) -> None:
        await self._listener.aclose()
