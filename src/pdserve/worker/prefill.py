"""The Prefill role: computes a prompt's KV and first tokens, holds the pages until Decode has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pdserve.admission.waits import MeasuredWaits
from pdserve.engine.scheduler import Sequence
from pdserve.errors import InvalidRequestError
from pdserve.transfer.agent import prompt_digest
from pdserve.wire.messages import GROUP, Busy, FirstToken, NodeStats, Prefilled

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import PrefillConfig
    from pdserve.engine.radix import KvCache
    from pdserve.engine.scheduler import SequenceOutput
    from pdserve.telemetry.metrics import WorkerMetrics
    from pdserve.transfer.owner import TransferOwner
    from pdserve.wire.messages import BusyReason, Cancel, Decode, Prefill, Reserve
    from pdserve.worker.engine_loop import EngineLoop
    from pdserve.worker.requests import LinkRequests, Request


class PrefillNode:
    """Serves `Prefill` frames of any number of Masters.

    The queue is bounded in prompt tokens; a prompt longer than the bound is taken only when nothing else waits.
    Held pages are bounded by the scheduler's `pinned_share`: over it new prompts wait.
    """

    def __init__(
        self,
        config: PrefillConfig,
        loop: EngineLoop,
        cache: KvCache,
        owner: TransferOwner,
        metrics: WorkerMetrics,
        *,
        omit_first_token: bool = False,
    ) -> None:
        self._config = config
        self._loop = loop
        self._cache = cache
        self._owner = owner
        self._metrics = metrics
        self._omit_first_token = omit_first_token
        self._waits = MeasuredWaits()
        self._active = 0
        self.draining = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when the load has changed: a prompt taken, or its hold ended."""
        cache.on_available = loop.kick

    @property
    def idle(self) -> bool:
        return self._active == 0

    def accept_prefill(self, frame: Prefill, link: LinkRequests) -> None:
        """Decide at once, in the order of arrival: queued, or refused."""
        key = (frame.id, frame.epoch, 0)
        if key in link:
            return  # a repeated frame changes nothing
        scheduler = self._loop.scheduler
        queued, limit = scheduler.queued_tokens, self._config.prefill_queue_tokens
        if self.draining or (queued and queued + len(frame.token_ids) > limit):
            reason: BusyReason = "draining" if self.draining else "prefill_queue_full"
            self._metrics.refused(reason)
            link.send(Busy(frame.id, frame.epoch, reason, self._waits.retry_after))
            return
        seq = Sequence(
            frame.id,
            list(frame.token_ids),
            len(frame.token_ids),
            frame.params,
            choices=tuple(range(frame.choices)),
            one_shot=True,
        )
        try:
            outputs = self._loop.submit(seq)
        except ValueError as error:
            link.refuse(key, InvalidRequestError(f"the prompt cannot be served here: {error}", param="prompt"))
            return
        self._active += 1
        link.start(key, self._run, frame, seq, outputs, link)
        self.on_change()

    def accept_reserve(self, frame: Reserve, link: LinkRequests) -> None:
        link.refuse((frame.id, frame.epoch, GROUP), InvalidRequestError("this node does not decode"))

    def accept_decode(self, frame: Decode, link: LinkRequests) -> None:
        link.refuse((frame.id, frame.epoch, frame.choice), InvalidRequestError("this node does not decode"))

    def accept_cancel(self, frame: Cancel, link: LinkRequests) -> None:
        link.cancel(frame.id, frame.epoch)

    def stats(self) -> NodeStats:
        counts, transfers = self._cache.counts(), self._owner.stats()
        return NodeStats(
            capacity=self._config.max_running_requests,
            active=self._active,
            queued=self._loop.scheduler.queued_tokens,
            pages_free=counts.free,
            pages_cached=counts.cached,
            pages_pinned=counts.pinned,
            pages_quarantined=counts.quarantined,
            transfers=transfers.running,
            draining=self.draining,
        )

    async def _run(
        self,
        request: Request,
        frame: Prefill,
        seq: Sequence,
        outputs: trio.MemoryReceiveChannel[SequenceOutput],
        link: LinkRequests,
    ) -> None:
        try:
            request.enter("prefill")
            drawn = [await outputs.receive() for _ in seq.choices]
            self._waits.add(trio.current_time() - request.since)
            # The sequence is over and in no step: its pages become ours at once, the slot goes to the next prompt.
            self._loop.scheduler.retire(seq, keep_pages=True)
            self._loop.kick()
            await self._hold(request, frame, seq, drawn, link)
        finally:
            self._active -= 1
            self._loop.scheduler.retire(seq)
            self._loop.kick()
            self.on_change()

    async def _hold(
        self, request: Request, frame: Prefill, seq: Sequence, drawn: list[SequenceOutput], link: LinkRequests
    ) -> None:
        """Keep the pages pinned until the hold ends: pulled, released, expired, or this task's end."""
        ended = trio.Event()
        pages = seq.pages

        def on_end(reason: str) -> None:
            self._metrics.transfer_finished(f"hold_{reason}")
            self._cache.release(pages)
            ended.set()

        try:
            digest = prompt_digest(frame.token_ids)
            hold = self._owner.hold(pages, seq.prompt_len, on_end, self._config.hold_timeout, digest=digest)
        except BaseException:
            self._cache.release(pages)
            raise
        try:
            request.hold = hold
            first = () if self._omit_first_token else tuple(_first_token(output) for output in drawn)
            link.send(Prefilled(frame.id, frame.epoch, hold.handle, first, seq.cached_tokens))
            request.enter("hold")
            await ended.wait()
        finally:
            hold.end("link")


def _first_token(output: SequenceOutput) -> FirstToken:
    return FirstToken(output.token.token_id, output.token.logprob, output.choice)
