"""How long requests have lately waited for admission: what a refused client is told to wait."""

from __future__ import annotations

_WEIGHT = 0.2
_LEAST = 1.0
"""Seconds. `Retry-After` is in whole seconds, and a client that comes back sooner only adds load."""


class MeasuredWaits:
    """Exponentially weighted mean of waits in seconds, of those admitted and of those that timed out."""

    def __init__(self) -> None:
        self._mean = 0.0

    def add(self, seconds: float) -> None:
        self._mean += _WEIGHT * (seconds - self._mean)

    @property
    def retry_after(self) -> float:
        """Seconds, at least 1."""
        return max(_LEAST, self._mean)
