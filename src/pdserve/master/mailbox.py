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
    """A link reader never waits for a request: frames are put synchronously, consecutive deltas are merged.

    Bounded by construction: deltas merge into one of at most max_tokens tokens, of every other frame an attempt gets a
    handful.
    """

    def __init__(self) -> None:
        self._frames: deque[msgspec.Struct | NodeLost] = deque()
        self._arrived = trio.Event()

    def deliver(self, node: Node, frame: msgspec.Struct) -> None:
        last = self._frames[-1] if self._frames else None
        if (
            isinstance(frame, Delta)
            and isinstance(last, Delta)
            and frame.start_index == last.start_index + len(last.token_ids)
            and last.finish is None
            and frame.choice == last.choice
        ):
            self._frames[-1] = merge_deltas(last, frame)
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
        return self._frames.popleft()
