"""The choices of one request on a Decode node: they share a lease, a place in the queue, and one transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from pdserve.errors import InvalidRequestError
from pdserve.wire.messages import Decode

if TYPE_CHECKING:
    from pdserve.admission.lease import Lease
    from pdserve.worker.room import Place

GroupKey = tuple[str, int]
"""(request id, epoch)"""


@attrs.frozen
class Footprint:
    """What a request will take of a node: `n` slots, and pages for a prompt and `n` outputs, all lengths in tokens."""

    prompt_tokens: int
    max_tokens: int
    n: int

    def pages(self, page_size: int, computed: int | None = None) -> int:
        """The worst case. The full pages of the `computed` first positions are shared by all choices."""
        if computed is None:
            computed = self.prompt_tokens - 1
        # The KV of the last token of an output is never computed.
        each = -(-(self.prompt_tokens + self.max_tokens - 1) // page_size)
        shared = computed // page_size
        return shared + self.n * (each - shared)


class Group:
    """`n` slots held or waited for, and the `Decode` frames that claim them. The first claim is the commit.

    `ttl`: seconds from the grant within which that has to happen; None where the claim comes with the request.
    `deadline`: until when it may wait for admission.
    """

    def __init__(
        self, key: GroupKey, wants: Footprint, lease: Lease, place: Place, ttl: float | None, deadline: float
    ) -> None:
        self.key = key
        self.id, self.epoch = key
        self.n = wants.n
        self.ttl = ttl
        self.deadline = deadline
        self.lease = lease
        self.place = place
        self.arrived = trio.current_time()
        self.committed = trio.Event()
        self._wants = wants
        self._claimed: set[int] = set()
        self._send, self._receive = trio.open_memory_channel[Decode](wants.n)

    def claim(self, frame: Decode) -> None:
        """Take a choice's frame in; a repeated one changes nothing. Raises InvalidRequestError when it does not fit."""
        wants = Footprint(len(frame.token_ids), frame.params.max_tokens, frame.n)
        if wants != self._wants or not 0 <= frame.choice < self.n:
            raise InvalidRequestError(f"choice {frame.choice} is not one of this request's {self.n}", param="n")
        if frame.choice in self._claimed:
            return
        self._claimed.add(frame.choice)
        self._send.send_nowait(frame)
        self.place.unpark()
        self.committed.set()

    def first_claim(self) -> Decode:
        """The one that committed the group; it has to be there."""
        return self._receive.receive_nowait()

    async def next_claim(self) -> Decode:
        """The others, in order of arrival; to be awaited n - 1 times."""
        return await self._receive.receive()
