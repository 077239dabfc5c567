"""The contract of a transfer agent: what the owner needs of NIXL, and what the in-memory agent offers to tests.

Every call is made by the one owner, serially. No call blocks on the network for longer than one post.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class KvHandle(msgspec.Struct, frozen=True, array_like=True):
    """Where P holds the KV of one prompt; travels through the Master as opaque bytes (MessagePack)."""

    agent: str
    hold: int
    """Unique per life of the agent: a late pull of an ended hold is stale, never another prompt's pages."""
    address: int
    page_bytes: int
    pages: tuple[int, ...]
    tokens: int
    """KV positions that the pages hold; only the last page can be partial."""
    digest: int = 0
    """`prompt_digest` of the prompt, so that a handle cannot serve another one; 0: from an older node, not told."""


def prompt_digest(token_ids: Sequence[int]) -> int:
    """63 bits of BLAKE2b over the ids; never 0."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1 or 1


class TransferAgent(Protocol):
    """One endpoint of KV transfers. Handles are opaque ints."""

    @property
    def name(self) -> str:
        """Unique per process incarnation."""
        ...

    def metadata(self) -> bytes:
        """What another agent needs for `add_peer`. Valid after `register`."""
        ...

    def register(self, address: int, nbytes: int, device: str) -> None:
        """Make the page pool readable for peers. Called once, before `metadata`."""
        ...

    def add_peer(self, metadata: bytes) -> str:
        """Admit a peer whose metadata has been authenticated; returns its agent name. Raises TransferError."""
        ...

    def remove_peer(self, name: str) -> None:
        """Forget a peer. Unknown names are ignored."""
        ...

    def post_read(
        self, peer: str, address: int, page_bytes: int, remote: Sequence[int], local: Sequence[int], note: bytes
    ) -> int:
        """Start pulling the peer's pages `remote` into the own pages `local`; returns a handle.

        `note` is delivered to the peer once all bytes have landed here. Raises TransferError, PeerDisconnectedError.
        """
        ...

    def poll(self, handle: int) -> bool:
        """True when the transfer is done, False while in progress. Raises TransferError when it failed."""
        ...

    def release(self, handle: int) -> None:
        """Free the handle of a terminal transfer."""
        ...

    def notify(self, peer: str, note: bytes) -> None:
        """Send a notification on its own. Raises TransferError, PeerDisconnectedError."""
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """Drain what has arrived: (agent name of the sender, note)."""
        ...

    def close(self) -> None:
        """Destroy the agent: the only certain end of its transfers."""
        ...
