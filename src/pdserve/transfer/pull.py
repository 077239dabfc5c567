"""One READ of a prompt's KV, seen from the request that waits for it, and the notes that settle it with P."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from pdserve.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.transfer.agent import KvHandle


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A notification between the owners of D and P: `done` asks, `valid` and `stale` answer, `probe` says nothing."""

    kind: Literal["done", "valid", "stale", "probe"]
    hold: int
    nonce: int
    """Random per pull, so that an answer can belong to nobody else."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Note)


def encode_note(note: Note) -> bytes:
    return _encode(note)


def decode_note(data: bytes) -> Note | None:
    """None for anything that is not a note."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None


class Stage(Enum):
    QUEUED = auto()
    """Waits for the peer to be admitted; nothing can land."""
    READING = auto()
    """Handed to the agent, and not known to be terminal: bytes may land at any time."""
    CONFIRMING = auto()
    """All bytes are here; P has been asked whether they are the prompt's."""
    ENDED = auto()
    """Valid, or `error` is set."""


class Pull:
    """A read into `local` pages, started by `TransferOwner.start_pull`. To be used as

        try:
            await pull.wait()
        finally:
            if pull.abandon():
                ...  # the local pages are no longer ours: the owner frees them once nothing can land any more

    The caller owns its references to the local pages until `abandon` has returned True.
    """

    def __init__(
        self,
        id_: int,
        handle: KvHandle,
        remote: Sequence[int],
        local: Sequence[int],
        nonce: int,
        limits: dict[Stage, float],
        on_abandon: Callable[[Pull], bool],
    ) -> None:
        """`limits`: seconds that each stage may take. For the owner only."""
        self.id = id_
        self.handle = handle
        self.remote = tuple(remote)
        self.local = tuple(local)
        self.nonce = nonce
        self.stage = Stage.QUEUED
        self.error: TransferError | None = None
        self._limits = limits
        self._since = trio.current_time()
        self._changed = trio.Event()
        self._on_abandon = on_abandon
        self._abandoned: bool | None = None

    async def wait(self) -> None:
        """Return once P has confirmed what was read: the local pages now hold the prompt's KV.

        Raises PeerDisconnectedError when the peer is gone, TransferError when the read failed, was stale, or took
        too long; the read itself may then still be running, which only `abandon` tells.
        """
        await trio.lowlevel.checkpoint()
        while self.error is None and self.stage is not Stage.ENDED:
            changed = self._changed
            with trio.move_on_at(self._since + self._limits[self.stage]) as deadline:
                await changed.wait()
            if deadline.cancelled_caught and not changed.is_set():
                raise TransferError(f"{_LATE[self.stage]} within {self._limits[self.stage]:g} s: {self}")
        if self.error is not None:
            raise self.error
        if self._abandoned:
            raise TransferError(f"the pull was abandoned: {self}")

    def abandon(self) -> bool:
        """The caller is no longer interested. Synchronous and idempotent; a no-op after success.

        True: bytes may still land, so the owner has taken over the caller's references to the local pages (they are
        in quarantine). False: they are still the caller's, and nothing will land in them any more.
        """
        if self._abandoned is None:
            self._abandoned = self._on_abandon(self)
        return self._abandoned

    def enter(self, stage: Stage) -> None:
        """For the owner: the next stage."""
        self.stage = stage
        self._since = trio.current_time()
        self._wake()

    def fail(self, error: TransferError) -> None:
        """For the owner: tell whoever waits; the first error stays. Says nothing about the read being terminal."""
        self.error = self.error or error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def __str__(self) -> str:
        return f"hold {self.handle.hold} of {self.handle.agent}, {len(self.local)} pages"


_LATE = {
    Stage.QUEUED: "the peer was not admitted",
    Stage.READING: "the read did not end",
    Stage.CONFIRMING: "the peer did not confirm its pages",
}
