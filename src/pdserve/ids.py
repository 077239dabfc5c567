"""Identifiers. All are labels without structure for those who receive them."""

from __future__ import annotations

import secrets
from itertools import count
from typing import NewType

RequestId = NewType("RequestId", str)
"""Internal id of a request: the Master's incarnation and a counter. Never the client's `X-Request-Id`."""

Incarnation = NewType("Incarnation", str)
"""Random name of one life of a process."""


def new_incarnation() -> Incarnation:
    """64 random bits as hex: two lives of a process never share one."""
    return Incarnation(secrets.token_hex(8))


class RequestIds:
    """Issues the request ids of one Master life; unique over all Masters and restarts."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._counter = count(1)

    def next(self) -> RequestId:
        return RequestId(f"{self._incarnation}-{next(self._counter)}")
