"""Ports: looked at before anything starts, so that a message names the flag; those of an `up` held against another."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from pdserve.config import CommonConfig, UpConfig, flag
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LISTENERS = (("host", "port"), ("link_host", "link_port"))


def with_usable_ports(config: UpConfig) -> UpConfig:
    """Take a free port for each that is 0. Raises `ConfigError` naming the flag that is wrong."""
    chosen: dict[str, Any] = {
        port_field: _usable(config, host_field, port_field) for host_field, port_field in _LISTENERS
    }
    if chosen["port"] == chosen["link_port"]:
        raise ConfigError(f"--port and --link-port must differ, both are {chosen['port']}")
    return attrs.evolve(config, **chosen)


def check_ports(config: CommonConfig) -> None:
    """Raise `ConfigError` naming the flag if this role could not listen where it is to."""
    for host_field, port_field in (*_LISTENERS, ("status_host", "status_port")):
        if hasattr(config, port_field):
            _usable(config, host_field, port_field)


def _usable(config: CommonConfig, host_field: str, port_field: str) -> int:
    """The port, or a free one for 0."""
    host, port = getattr(config, host_field), getattr(config, port_field)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{flag(host_field)} {host}: cannot listen there: {error.strerror}") from error
        hint = " Is another pdserve running?" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"{flag(port_field)} {port}: cannot listen on {host}: {error.strerror}.{hint} "
            f"Choose another port with {flag(port_field)}"
        ) from error


@contextmanager
def hold_ports(config: UpConfig) -> Iterator[None]:
    """Keep the ports for this `up` while the block runs: its Master begins to listen only seconds after the look.

    Until then the workers of a second `up` would register with the first one's Master. The claim is a name among the
    abstract Unix sockets, which belong to the network namespace as ports do and are gone with the process that holds
    them. Raises `ConfigError` naming a port that another `up` holds.
    """
    with ExitStack() as held:
        for host_field, port_field in _LISTENERS:
            host, port = getattr(config, host_field), getattr(config, port_field)
            claim = held.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(f"\0pdserve-up {host} {port}")
            except OSError as error:
                name = flag(port_field)
                raise ConfigError(
                    f"{name} {port}: another pdserve is running on {host}. Choose another port with {name}"
                ) from error
        yield
