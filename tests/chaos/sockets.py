"""TCP connections of another process: which there are, and how to shut one down. Linux; needs the right to ptrace."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

import attrs

_PIDFD_GETFD = 438
"""Number of the system call, the same on all architectures."""
_ESTABLISHED = "01"


@attrs.frozen
class Connection:
    fd: int
    """In the process that owns it."""
    local: int
    remote: int
    """Ports."""


def connections(pid: int) -> list[Connection]:
    """The established IPv4 connections of a process."""
    owned: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = os.readlink(entry).partition(":")
            if kind == "socket":
                owned[inode.strip("[]")] = int(entry.name)
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _ESTABLISHED and fields[9] in owned:
            local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
            found.append(Connection(owned[fields[9]], local, remote))
    return found


def shut_down(pidfd: int, fd: int) -> None:
    """Shut the connection down in both directions, under its owner. Raises OSError."""
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if copy < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"pidfd_getfd: {os.strerror(number)}")
    with socket.socket(fileno=copy) as sock:
        sock.shutdown(socket.SHUT_RDWR)
