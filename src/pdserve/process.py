"""A child process of `up`: started from the main thread, awaited without polling, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import trio

from pdserve import control

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

_STDERR = 2


class ChildProcess:
    """One running child, as a context manager: left, it is dead and its resources are back.

    Started here and not by `trio.lowlevel.open_process`, which starts processes from a worker thread: the kernel would
    deliver the child's parent-death signal when that thread ends (see `control.tie_to_parent`). The child's stdout is
    the parent's stderr, so that what libraries print does not mix with what `up` prints.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, restarts: int = 0) -> None:
        """Start it. Raises `OSError` when the system refuses."""
        their_end, self._control = os.pipe()
        self._pidfd = -1
        try:
            own = {
                control.CONTROL_FD: str(their_end),
                control.UNDER_UP: "1",
                control.UP_PID: str(os.getpid()),
                control.RESTARTS: str(restarts),
            }
            # The child inherits the mask: Ctrl-C is not for it, from its first instruction on, and none is lost here.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._popen = subprocess.Popen(
                    command,
                    env={**env, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR,
                    pass_fds=(their_end,),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            os.close(self._control)
            raise
        finally:
            os.close(their_end)
        self._pidfd = os.pidfd_open(self._popen.pid)

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def wait(self) -> int:
        """Wait for its end; the exit status, negative for a signal. One task at a time."""
        while self._popen.poll() is None:
            await trio.lowlevel.wait_readable(self._pidfd)
        return self._popen.returncode

    def terminate(self) -> None:
        """Ask it to drain and leave. Harmless when it has gone."""
        self._popen.send_signal(signal.SIGTERM)

    def leave(self) -> None:
        """End the control pipe: it leaves at once. Idempotent."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def kill(self) -> None:
        """SIGKILL. Harmless when it has gone."""
        self._popen.kill()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: TracebackType | type[BaseException] | BaseException | None) -> None:
        self.kill()
        self._popen.wait()  # after SIGKILL this takes no time that could be waited for otherwise
        self.leave()
        if self._pidfd >= 0:
            trio.lowlevel.notify_closing(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def describe_exit(status: int) -> str:
    """`exited with code 3` or `was killed by SIGSEGV`."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
