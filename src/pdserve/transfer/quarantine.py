"""Destination pages of reads that their request has left while bytes could still land in them. No I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHARE = 0.25
_GRACE = 5.0
_PATIENCE = 60.0
"""Seconds. See `over_limit`."""


@attrs.frozen
class _Entry:
    pages: tuple[int, ...]
    since: float


class Quarantine:
    """Keeps the pages of abandoned transfers together until the transfer is terminal: never freed on a timeout.

    Times are seconds of any one clock. Misuse raises RuntimeError.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        """By transfer, in the order of abandonment: the first is the oldest."""
        self._pages = 0

    def add(self, handle: int, pages: Sequence[int], now: float) -> None:
        """The transfer `handle` was abandoned while running; it may still write to `pages`."""
        if handle in self._entries:
            raise RuntimeError(f"transfer {handle} is in quarantine already")
        self._entries[handle] = _Entry(tuple(pages), now)
        self._pages += len(pages)

    def terminal(self, handle: int) -> tuple[int, ...]:
        """The transfer has ended: its pages, which are now safe to reuse. Empty if it was not in quarantine."""
        entry = self._entries.pop(handle, None)
        if entry is None:
            return ()
        self._pages -= len(entry.pages)
        return entry.pages

    @property
    def count(self) -> int:
        """Pages in quarantine."""
        return self._pages

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest transfer in here was abandoned; 0 when empty."""
        for entry in self._entries.values():
            return now - entry.since
        return 0.0

    def over_limit(self, total_pages: int, now: float) -> str | None:
        """Why this process has to end, which alone ends such transfers for certain; None while it need not.

        That is when a transfer does not end for a minute, or when such pages are over a quarter of the pool. Those of
        the last seconds do not count there: many clients may leave at once, and most transfers end at once.
        """
        if self.oldest_age(now) > _PATIENCE:
            return f"a KV transfer has not ended {_PATIENCE:g} s after its request has left it"
        stuck = sum(len(entry.pages) for entry in self._entries.values() if now - entry.since > _GRACE)
        if stuck > _SHARE * total_pages:
            return f"{stuck} of {total_pages} KV pages wait for transfers that do not end"
        return None
