"""A clock for what needs all of the machine: it runs by the share of the processors that other programs leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_TICKS = os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Fields of /proc/PID/stat behind the name."""
_IDLE, _IOWAIT = 3, 4
"""Fields of the first line of /proc/stat."""


class LeftTime:
    """Seconds that the machine has had for `pids` and this process: idle time counts, that of others does not."""

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = {*pids, os.getpid()}

    def __call__(self) -> float:
        lines = Path("/proc/stat").read_text().splitlines()
        fields = [int(field) for field in lines[0].split()[1:]]
        cores = sum(line.startswith("cpu") for line in lines) - 1
        free = fields[_IDLE] + fields[_IOWAIT]
        return (free + sum(map(_used, self._pids))) / _TICKS / cores


def _used(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[_USER]) + int(fields[_SYSTEM])
