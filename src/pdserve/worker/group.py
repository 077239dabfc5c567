"""The choices of one request on a Decode node: they share a lease, a place in the queue, and one transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pdserve.errors import InvalidRequestError
from pdserve.wire.footprint import Footprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.admission.lease import Lease
    from pdserve.wire.messages import Decode
    from pdserve.worker.room import Place, Wish

GroupKey = tuple[str, int]
"""(request id, epoch)"""


class Group:
    """`n` slots held or waited for, and the `Decode` frames that claim them. The first claim is the commit.

    `ttl`: seconds from the grant within which that has to happen; None where the claim comes with the request.
    `deadline`: until when it may wait for admission. `wish`: the room that a claim asks for; the place asks as soon as
    lease and claim are there, synchronously, so that the order of tasks plays no role.
    """

    def __init__(
        self,
        key: GroupKey,
        wants: Footprint,
        lease: Lease,
        place: Place,
        ttl: float | None,
        deadline: float,
        wish: Callable[[Decode], Wish],
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
        self._wish = wish
        self._frames: dict[int, Decode | None] = {}
        """By choice, in order of arrival; None: dropped."""
        self._first: Decode | None = None
        self._changed = trio.Event()
        if not lease.granted:
            lease.on_grant = self._ask

    @property
    def first(self) -> Decode:
        """The claim that committed the group."""
        assert self._first is not None
        return self._first

    def claim(self, frame: Decode) -> None:
        """Take a choice's frame in; a repeated one changes nothing. Raises InvalidRequestError when it does not fit."""
        wants = Footprint(len(frame.token_ids), frame.params.max_tokens, frame.n)
        if wants != self._wants or not 0 <= frame.choice < self.n:
            raise InvalidRequestError(f"choice {frame.choice} is not one of this request's {self.n}", param="n")
        if frame.choice in self._frames:
            return
        self._frames[frame.choice] = frame
        self._wake()
        if self._first is None:
            self._first = frame
            self.committed.set()
            self._ask()

    def drop(self, choice: int) -> None:
        """This choice will not run; what has begun already is not stopped by this."""
        if 0 <= choice < self.n:
            self._frames[choice] = None
            self._wake()

    def frame(self, choice: int) -> Decode | None:
        """The claim of a choice that has arrived; None: it was dropped."""
        return self._frames[choice]

    async def arrival(self, index: int) -> int:
        """Which choice was the index-th to be claimed or dropped."""
        while len(self._frames) <= index:
            await self._changed.wait()
        return list(self._frames)[index]

    def _ask(self) -> None:
        if self.lease.granted and self._first is not None:
            self.place.ask(self._wish(self._first))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
