"""Frames of one attempt on their way from the link readers to the coordinator: bounded, merged, in order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

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
        self._frames: deque[_Waiting] = deque()
        self._newest: dict[int, _Waiting] = {}
        """The newest waiting delta of each choice."""
        self._arrived = trio.Event()

    def deliver(self, node: Node, frame: msgspec.Struct) -> None:
        if not isinstance(frame, Delta):
            self._add(_Waiting(frame))
            return
        newest = self._newest.get(frame.choice)
        if newest is not None and _continues(frame, newest.frame):
            newest.frame = merge_deltas(newest.frame, frame)
        else:
            self._newest[frame.choice] = waiting = _Waiting(frame)
            self._add(waiting)

    def lost(self, node: Node, reason: str) -> None:
        self._add(_Waiting(NodeLost(node, reason)))

    async def arrival(self) -> None:
        """Return once a frame is there; the caller bounds the wait."""
        while not self._frames:
            self._arrived = trio.Event()
            await self._arrived.wait()

    def take(self) -> msgspec.Struct | NodeLost | None:
        """The next frame; None where none waits."""
        if not self._frames:
            return None
        waiting = self._frames.popleft()
        if isinstance(waiting.frame, Delta) and self._newest.get(waiting.frame.choice) is waiting:
            del self._newest[waiting.frame.choice]
        return waiting.frame  # type: ignore[no-any-return]

    def _add(self, waiting: _Waiting) -> None:
        self._frames.append(waiting)
        self._arrived.set()


@attrs.define(eq=False)
class _Waiting:
    frame: Any
    """A frame or NodeLost; a delta grows while it waits."""


def _continues(new: Delta, old: Delta) -> bool:
    return old.finish is None and new.start_index == old.start_index + len(old.token_ids)
