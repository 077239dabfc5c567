"""Nodes that should be here and are not: what `/readyz` says of them."""

from __future__ import annotations

from collections import OrderedDict

import attrs

_MOST = 64
_REMEMBERED = 600.0
"""Seconds. A node that was taken away for good is not news for ever."""


@attrs.frozen
class _Absence:
    since: float
    text: str


class Absences:
    """Why nodes were refused or lost, the newest reason of each, for ten minutes or until it registers.

    Times are seconds of any one clock. Bounded: the oldest are forgotten first.
    """

    def __init__(self) -> None:
        self._absences: OrderedDict[str, _Absence] = OrderedDict()

    def note(self, node_id: str, text: str, now: float) -> None:
        self._absences.pop(node_id, None)
        self._absences[node_id] = _Absence(now, text)
        while len(self._absences) > _MOST:
            self._absences.popitem(last=False)

    def forget(self, node_id: str) -> None:
        """Idempotent."""
        self._absences.pop(node_id, None)

    def reasons(self, now: float) -> list[str]:
        """One line each, oldest first."""
        return [
            f"{one.text} ({now - one.since:.0f} s ago)"
            for one in self._absences.values()
            if now - one.since <= _REMEMBERED
        ]
