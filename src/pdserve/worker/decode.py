"""The Decode role: admits a request into a slot, pulls its KV from P, generates. The only emitter of output."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from pdserve.admission.lease import Lease
from pdserve.admission.pool import QueueFullError, SlotAdmission
from pdserve.admission.waits import MeasuredWaits
from pdserve.engine.scheduler import Sequence
from pdserve.errors import InvalidRequestError, TransferError, WorkerFailedError
from pdserve.transfer.agent import KvHandle
from pdserve.wire.messages import Admitted, Busy, NodeStats, Settled
from pdserve.worker.output import ChoiceOutput
from pdserve.worker.page_queue import PageQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import DecodeConfig
    from pdserve.engine.radix import KvCache
    from pdserve.engine.scheduler import SequenceOutput
    from pdserve.engine.slots import SlotPool
    from pdserve.telemetry.metrics import WorkerMetrics
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.transfer.owner import TransferOwner
    from pdserve.wire.messages import BusyReason, Decode, Prefill
    from pdserve.worker.engine_loop import EngineLoop
    from pdserve.worker.page_queue import PagePlace
    from pdserve.worker.requests import LinkRequests, Request

_handles = msgspec.msgpack.Decoder(KvHandle)


class DecodeNode:
    """Serves `Decode` frames of any number of Masters; the only authority over its slots.

    A request takes a lease (FIFO over all Masters), a request slot and the worst-case pages, in this order, within the
    admission deadline. Ticket and place in the queue for pages are both drawn in the order in which the link readers
    decode the frames. The lease is given back when the slot has been recycled, in every path.
    """

    def __init__(
        self,
        config: DecodeConfig,
        loop: EngineLoop,
        cache: KvCache,
        slots: SlotPool,
        owner: TransferOwner,
        tokenizer: Tokenizer,
        metrics: WorkerMetrics,
    ) -> None:
        self._config = config
        self._loop = loop
        self._cache = cache
        self._slots = slots
        self._owner = owner
        self._tokenizer = tokenizer
        self._metrics = metrics
        self.pool = SlotAdmission(config.max_running_requests, None if config.disable_admission else config.queue_size)
        self._pages = PageQueue(cache)
        self._waits = MeasuredWaits()
        self._active = 0
        self.draining = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when the load has changed: a lease taken or given back."""
        cache.on_available = self._pages.pump

    @property
    def idle(self) -> bool:
        return self._active == 0

    def accept_prefill(self, frame: Prefill, link: LinkRequests) -> None:
        link.refuse((frame.id, frame.epoch, 0), InvalidRequestError("this node does not prefill"))

    def accept_decode(self, frame: Decode, link: LinkRequests) -> None:
        """Validate and draw the ticket of the admission queue, synchronously; then a task does the rest."""
        key = (frame.id, frame.epoch, frame.choice)
        if key in link:
            return
        try:
            self._validate(frame)
            if self.draining:
                self._busy(frame, link, "draining")
                return
            lease = Lease(self.pool)
        except InvalidRequestError as error:
            link.refuse(key, error)
            return
        except QueueFullError:
            self._busy(frame, link, "queue_full")
            return
        self._active += 1
        link.start(key, self._run, frame, lease, self._pages.join(), link)
        self.on_change()

    def stats(self) -> NodeStats:
        counts, transfers = self._cache.counts(), self._owner.stats()
        return NodeStats(
            capacity=self.pool.capacity,
            active=self.pool.active,
            queued=self.pool.queued,
            pages_free=counts.free,
            pages_cached=counts.cached,
            pages_pinned=counts.pinned,
            pages_quarantined=counts.quarantined,
            transfers=transfers.running,
            draining=self.draining,
        )

    def _validate(self, frame: Decode) -> None:
        length, params = len(frame.token_ids), frame.params
        if length < 1:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if params.max_tokens < 1:
            raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
        if length + params.max_tokens > self._loop.engine.card.max_len:
            raise InvalidRequestError(
                f"prompt and max_tokens are over the limit of {self._loop.engine.card.max_len} tokens",
                param="max_tokens",
            )
        if self._total_pages(frame) > self._cache.num_pages:
            raise InvalidRequestError("prompt and max_tokens need more KV pages than the node has", param="max_tokens")

    def _total_pages(self, frame: Decode) -> int:
        # The KV of the last token of an output is never computed.
        return -(-(len(frame.token_ids) + frame.params.max_tokens - 1) // self._cache.page_size)

    def _busy(self, frame: Decode, link: LinkRequests, reason: BusyReason) -> None:
        self._metrics.refused(reason)
        link.send(Busy(frame.id, frame.epoch, reason, self._waits.retry_after, frame.choice))

    async def _run(self, request: Request, frame: Decode, lease: Lease, place: PagePlace, link: LinkRequests) -> None:
        try:
            with lease, place:
                seq = await self._admit(request, frame, lease, place, link)
                if seq is not None:
                    lease.keep()  # from here on the sequence's end gives it back
                    try:
                        await self._generate(request, frame, seq, link)
                    finally:
                        self._loop.scheduler.retire(seq)
        finally:
            self._active -= 1
            self.on_change()

    async def _admit(
        self, request: Request, frame: Decode, lease: Lease, place: PagePlace, link: LinkRequests
    ) -> Sequence | None:
        """Lease, slot and pages within the admission deadline; None: refused, and told so."""
        started = trio.current_time()
        limit = math.inf if self._config.disable_admission else self._config.admission_timeout
        if frame.admission_timeout is not None:
            limit = min(limit, frame.admission_timeout)
        prompt_len = len(frame.token_ids)
        reusable = prompt_len if frame.first is not None else prompt_len - 1
        with trio.move_on_after(max(limit, 0.0)) as deadline:
            request.enter("admission")
            await lease.wait()
            request.enter("pages")
            pages, cached = await place.claim(frame.token_ids, reusable, self._total_pages(frame))
        if deadline.cancelled_caught:
            self._waits.add(trio.current_time() - started)
            self._busy(frame, link, "timeout")
            return None
        slots = self._slots.allocate()
        assert slots is not None, "a lease was granted without a free slot"
        waited = trio.current_time() - started
        self._waits.add(waited)
        self._metrics.admitted(waited)
        link.send(Admitted(frame.id, frame.epoch, frame.choice, waited))
        return Sequence(
            frame.id,
            list(frame.token_ids),
            prompt_len,
            frame.params,
            choices=(frame.choice,),
            slot=slots[0],
            pages=pages,
            computed=cached * self._cache.page_size,
            cached_tokens=cached * self._cache.page_size,
            on_retired=partial(self._recycled, lease),
        )

    async def _generate(self, request: Request, frame: Decode, seq: Sequence, link: LinkRequests) -> None:
        output = ChoiceOutput(frame, self._tokenizer, link)
        if frame.first is not None:
            token = frame.first.token_id
            finish, stop_reason = self._loop.scheduler.judge(frame.params, token, 1, seq.prompt_len + 1)
            if output.push(token, frame.first.logprob, finish, stop_reason):
                link.send(Settled(frame.id, frame.epoch))
                return
            seq.tokens.append(token)
        request.enter("transfer")
        pulled = await self._pull(frame, seq)
        link.send(Settled(frame.id, frame.epoch, pulled))
        request.enter("decode")
        outputs = self._loop.submit(seq)
        if frame.first is None:
            with trio.move_on_after(self._config.first_token_timeout) as deadline:
                if self._take(await outputs.receive(), output):
                    return
            if deadline.cancelled_caught:
                raise WorkerFailedError(f"no first token within {self._config.first_token_timeout:g} s")
        while not self._take(await outputs.receive(), output):
            pass

    def _recycled(self, lease: Lease) -> None:
        lease.release()
        self.on_change()

    def _take(self, out: SequenceOutput, output: ChoiceOutput) -> bool:
        return output.push(out.token.token_id, out.token.logprob, out.finish, out.stop_reason)

    async def _pull(self, frame: Decode, seq: Sequence) -> int:
        """Bring the prompt's KV into the sequence's pages; only confirmed pages enter the prefix cache."""
        page_size = self._cache.page_size
        have, need = seq.computed // page_size, -(-seq.prompt_len // page_size)
        if have < need:
            try:
                handle = _handles.decode(frame.handle)
            except msgspec.DecodeError as error:
                raise TransferError(f"unreadable KV handle: {error}") from error
            if handle.tokens != seq.prompt_len:
                raise TransferError(f"the KV handle is of {handle.tokens} tokens, the prompt has {seq.prompt_len}")
            pull = self._owner.start_pull(handle, have, seq.pages[have:need])
            outcome = "failed"
            try:
                await pull.wait()
                outcome = "done"
            finally:
                self._metrics.transfer_finished(outcome)
                if outcome != "done" and pull.abandon():
                    # A READ still writes into these pages: they are the owner's until it is terminal.
                    seq.pages = seq.pages[:have] + seq.pages[need:]
        seq.computed = seq.prompt_len if frame.first is not None else seq.prompt_len - 1
        self._cache.insert(seq.tokens[: seq.computed], seq.pages)
        return max(0, need - have)
