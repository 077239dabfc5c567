"""How a child of `up` is tied to it: it leaves when `up` asks, and never outlives it.

`up` holds the other end of a pipe that the child inherits. The end of that pipe means: leave at once. It comes when
`up` closes it and when `up` is gone, however it went.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

import trio

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

CONTROL_FD = "PDSERVE_CONTROL_FD"
"""File descriptor of the inherited pipe."""
UNDER_UP = "PDSERVE_UNDER_UP"
"""Set in the children of `up`."""
UP_PID = "PDSERVE_UP_PID"
"""Process id of the `up` that started this process."""
RESTARTS = "PDSERVE_RESTARTS"
"""How often `up` has restarted this child before."""

_PR_SET_PDEATHSIG = 1


def under_up() -> bool:
    """Whether this process is a child of `up`."""
    return bool(os.environ.get(UNDER_UP))


def restarts() -> int:
    """How often `up` has restarted this process before; 0 in its first life or without `up`."""
    return int(os.environ.get(RESTARTS, "0"))


def tie_to_parent() -> None:
    """For a child of `up`, before anything else: die with the parent, and ignore what a terminal sends to `up`.

    The kernel sends the signal when the *thread* that started this process ends, so `up` starts children from its main
    thread only. Does nothing without `up`.
    """
    if not under_up():
        return
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.environ.get(UP_PID)
    if parent and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):  # it went between starting us and the line above
            os._exit(70)


async def watch_control(leave: Callable[[], None]) -> None:
    """Call `leave` once when the control pipe ends. Without `up` this sleeps until it is cancelled."""
    number = os.environ.get(CONTROL_FD)
    if number is None:
        await trio.sleep_forever()
    try:
        stream = trio.lowlevel.FdStream(os.dup(int(number)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{CONTROL_FD}={number} is not an open file descriptor") from error
    async with stream:
        while await stream.receive_some(64):
            pass  # nothing is sent over it; only its end means something
    leave()
