"""How many files and sockets a serving process may have open: as many as the system lets it."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_limit() -> None:
    """Take the hard limit as the soft one: systems give 1024 by default, for select(), which is not used."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # not everywhere is an unlimited number one that can be asked for
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
