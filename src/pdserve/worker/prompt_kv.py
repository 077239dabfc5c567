"""The KV of one prompt on its way from P into pages of this node: one transfer for all choices, settled once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio

from pdserve.errors import TransferError
from pdserve.transfer.agent import KvHandle, prompt_digest
from pdserve.wire.messages import Settled

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from pdserve.engine.radix import KvCache
    from pdserve.engine.scheduler import Sequence
    from pdserve.telemetry.metrics import WorkerMetrics
    from pdserve.transfer.owner import TransferOwner
    from pdserve.wire.messages import Decode
    from pdserve.worker.requests import LinkRequests

_handles = msgspec.msgpack.Decoder(KvHandle)


class PromptKv:
    """The first `computed` positions of a prompt, for `seqs`, whose page tables begin with the same full pages.

    What the prefix cache lacks is pulled into the table of the first one; the others copy the partial page from there.
    """

    def __init__(
        self,
        owner: TransferOwner,
        cache: KvCache,
        metrics: WorkerMetrics,
        frame: Decode,
        seqs: SequenceOf[Sequence],
        computed: int,
    ) -> None:
        self._owner = owner
        self._cache = cache
        self._metrics = metrics
        self._frame = frame
        self._seqs = seqs
        self._computed = computed
        self._cached = seqs[0].cached_tokens // cache.page_size
        self._pages = seqs[0].pages[: -(-computed // cache.page_size)]
        self._settled = False
        self._there = trio.Event()
        self.wanted = trio.Event()
        """A choice waits for the KV."""

    async def wait(self) -> None:
        """Ask for the KV and wait for it. Whoever runs `pull` for all ends this wait, in failure by cancelling it."""
        self.wanted.set()
        await self._there.wait()

    async def pull(self, link: LinkRequests) -> None:
        """Bring the KV here. Only confirmed pages enter the prefix cache and count as computed.

        Raises TransferError. Pages that a READ may still write to when this is left go to the transfer owner; the
        references of the sequences are untouched.
        """
        missing = self._pages[self._cached :]
        if missing:
            await self._read(missing)
            self._cache.insert(self._frame.token_ids[: self._computed], self._pages)
            self._cache.release(missing)
        for seq in self._seqs:
            seq.computed = self._computed
        self.settle(link, len(missing))
        self._there.set()

    def settle(self, link: LinkRequests, pulled: int = 0) -> None:
        """Tell the Master, once, that P is not needed any more."""
        if not self._settled:
            self._settled = True
            link.send(Settled(self._frame.id, self._frame.epoch, pulled))

    async def _read(self, missing: list[int]) -> None:
        """Pull into `missing` with references of its own, which the caller releases after success: whichever choice
        leaves meanwhile, the pages stay for the others and for the READ.
        """
        handle = self._handle()
        self._cache.pin(missing)
        outcome, ours = "failed", True
        try:
            pull = self._owner.start_pull(handle, self._cached, missing)
            try:
                await pull.wait()
                outcome = "done"
            finally:
                ours = outcome == "done" or not pull.abandon()
        finally:
            self._metrics.transfer_finished(outcome)
            if outcome != "done" and ours:
                self._cache.release(missing)

    def _handle(self) -> KvHandle:
        try:
            handle = _handles.decode(self._frame.handle)
        except msgspec.DecodeError as error:
            raise TransferError(f"unreadable KV handle: {error}") from error
        length = len(self._frame.token_ids)
        if handle.tokens != length:
            raise TransferError(f"the KV handle is of {handle.tokens} tokens, the prompt has {length}")
        if handle.digest not in (0, prompt_digest(self._frame.token_ids)):
            raise TransferError("the KV handle is of another prompt")
        # P may hold one page more than is needed here, when the last position is computed again.
        return msgspec.structs.replace(handle, pages=handle.pages[: len(self._pages)])
