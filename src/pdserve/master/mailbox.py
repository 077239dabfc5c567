"""Frames of one attempt on their way from the link readers to the coordinator: bounded, merged, in order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs
import trio

from pdserve.wire.deltas import merge_deltas
from pdserve.wire.messages import Delta

if TYPE_CHECKING:
    import msgspec

    from pdserve.master.registry import Node


@attrs.frozen
class NodeLost:
    """The node of this attempt is gone or was replaced."""

    node: Node
    reason: str


class AttemptMailbox:
    """A link reader never waits for a request: frames are put synchronously, deltas of a choice that wait are merged.

    Bounded by construction: deltas merge into one of at most max_tokens tokens a choice, of every other frame an
    attempt gets a handful.
    """

    def __init__(self) -> None:
        self._frames: deque[msgspec.Struct | NodeLost | int] = deque()
        """In order of arrival; a number stands for the output of that choice."""
        self._deltas: dict[int, Delta] = {}
        self._arrived = trio.Event()

    def deliver(self, node: Node, frame: msgspec.Struct) -> None:
        if isinstance(frame, Delta):
            waiting = self._deltas.get(frame.choice)
            if waiting is None:
                self._deltas[frame.choice] = frame
                self._frames.append(frame.choice)
            elif _continues(frame, waiting):
                self._deltas[frame.choice] = merge_deltas(waiting, frame)
            else:
                self._frames.append(frame)  # a gap, or after the end: for the reader to judge
        else:
            self._frames.append(frame)
        self._arrived.set()

    def lost(self, node: Node, reason: str) -> None:
        self._frames.append(NodeLost(node, reason))
        self._arrived.set()

    async def next(self) -> msgspec.Struct | NodeLost:
        """The next frame; the caller bounds the wait."""
        while not self._frames:
            self._arrived = trio.Event()
            await self._arrived.wait()
        frame = self._frames.popleft()
        return self._deltas.pop(frame) if isinstance(frame, int) else frame


def _continues(frame: Delta, waiting: Delta) -> bool:
    return waiting.finish is None and frame.start_index == waiting.start_index + len(waiting.token_ids)
