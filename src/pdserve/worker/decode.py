"""The Decode role: admits a request into slots, pulls its KV from P, generates. The only emitter of output."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import trio

from pdserve.admission.lease import Lease
from pdserve.admission.pool import QueueFullError, SlotAdmission
from pdserve.admission.waits import MeasuredWaits
from pdserve.errors import InvalidRequestError
from pdserve.wire.footprint import Footprint
from pdserve.wire.messages import GROUP, Admitted, Busy, NodeStats, Reserved
from pdserve.worker.choices import Choices
from pdserve.worker.group import Group
from pdserve.worker.room import RoomQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.admission.lease import SubLease
    from pdserve.config import DecodeConfig
    from pdserve.engine.radix import KvCache
    from pdserve.engine.scheduler import Sequence
    from pdserve.engine.slots import SlotPool
    from pdserve.telemetry.metrics import ReservationOutcome, WorkerMetrics
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.transfer.owner import TransferOwner
    from pdserve.wire.messages import BusyReason, Cancel, Decode, Prefill, Reserve
    from pdserve.worker.engine_loop import EngineLoop
    from pdserve.worker.requests import LinkRequests, Request

_UNLIMITED = 2**31
"""Capacity of the pool of a node without admission: every lease is granted, requests wait for room only."""


class DecodeNode:
    """Serves `Reserve` and `Decode` frames of any number of Masters; the only authority over its slots.

    A request takes a lease (FIFO over all Masters), then request slots and the worst-case pages for all its choices,
    within the admission deadline. Ticket and place in the queue are both drawn, and both granted, in the order in which
    the link readers decode the frames. Each slot's part of the lease is given back when the slot has been recycled, in
    every path.
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
        *,
        fail_choice: int = -1,
    ) -> None:
        self._config = config
        self._cache = cache
        self._slots = slots
        self._owner = owner
        self._max_len = loop.engine.card.max_len
        self._metrics = metrics
        admits = not config.disable_admission
        self.pool = SlotAdmission(slots.capacity if admits else _UNLIMITED, config.queue_size if admits else None)
        self._room = RoomQueue(slots, cache)
        self._choices = Choices(
            loop, cache, owner, tokenizer, metrics, config.first_token_timeout, fail_choice=fail_choice
        )
        self._waits = MeasuredWaits()
        self._groups: dict[tuple[LinkRequests, str, int], Group] = {}
        """By link, request id and epoch: what one Master says never concerns another's requests."""
        self._reserved = 0
        self.draining = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when the load has changed: a lease taken or given back."""
        cache.on_available = self._room.pump

    @property
    def idle(self) -> bool:
        return not self._groups

    def accept_prefill(self, frame: Prefill, link: LinkRequests) -> None:
        link.refuse((frame.id, frame.epoch, 0), InvalidRequestError("this node does not prefill"))

    def accept_reserve(self, frame: Reserve, link: LinkRequests) -> None:
        """Validate and draw the ticket of the admission queue, synchronously; then a task does the rest."""
        if (link, frame.id, frame.epoch) in self._groups:
            return  # a repeated frame changes nothing
        if 0 < frame.ttl < math.inf:
            self._enter(frame, Footprint(frame.prompt_tokens, frame.max_tokens, frame.n), frame.ttl, link)
        else:
            error = InvalidRequestError(f"a reservation cannot live for {frame.ttl} s", param="reservation_ttl")
            link.refuse((frame.id, frame.epoch, GROUP), error)

    def accept_decode(self, frame: Decode, link: LinkRequests) -> None:
        """A choice of a reservation claims its slot; any other request is taken in as `accept_reserve` does."""
        group = self._groups.get((link, frame.id, frame.epoch))
        if group is None and frame.reserved:
            self._busy(frame, link, "expired", count=frame.choice == 0)  # the group is refused once
            return
        if not 0 <= frame.choice < frame.n:
            error = InvalidRequestError(f"there is no choice {frame.choice} of {frame.n}", param="n")
            link.refuse((frame.id, frame.epoch, frame.choice), error)
            return
        if group is None and frame.choice == 0:
            group = self._enter(frame, Footprint(len(frame.token_ids), frame.params.max_tokens, frame.n), None, link)
        if group is None:
            return  # refused; choice 0 has got the answer for all
        try:
            group.claim(frame)
        except InvalidRequestError as error:
            link.cancel(frame.id, frame.epoch)
            link.refuse((frame.id, frame.epoch, GROUP), error)

    def accept_cancel(self, frame: Cancel, link: LinkRequests) -> None:
        """End the request or one choice of it, wherever it is."""
        group = self._groups.get((link, frame.id, frame.epoch))
        if group is not None and frame.choice != GROUP:
            group.drop(frame.choice)
        link.cancel(frame.id, frame.epoch, frame.choice)

    def stats(self) -> NodeStats:
        counts, transfers = self._cache.counts(), self._owner.stats()
        active, queued = self.pool.active, self.pool.queued
        if self._config.disable_admission:
            active, queued = self._slots.used, self.pool.active - self._slots.used
        return NodeStats(
            capacity=self._slots.capacity,
            active=active,
            queued=queued,
            reserved=self._reserved,
            pages_free=counts.free,
            pages_cached=counts.cached,
            pages_pinned=counts.pinned,
            pages_quarantined=counts.quarantined,
            transfers=transfers.running,
            draining=self.draining,
        )

    def _enter(self, frame: Reserve | Decode, wants: Footprint, ttl: float | None, link: LinkRequests) -> Group | None:
        """Validate, then take a ticket and a place in the queues and start the group's task. None: refused."""
        task = (frame.id, frame.epoch, GROUP if wants.n > 1 else 0)
        limit = math.inf if self._config.disable_admission else self._config.admission_timeout
        if frame.admission_timeout is not None:
            limit = min(limit, max(0.0, frame.admission_timeout))
        try:
            self._validate(wants)
            if self.draining:
                self._busy(frame, link, "draining")
                return None
            lease = Lease(self.pool, wants.n)
        except InvalidRequestError as error:
            link.refuse(task, error)
            return None
        except QueueFullError:
            self._busy(frame, link, "queue_full")
            return None
        if limit <= 0 and not lease.granted:
            # Waiting for its task to run it would stand in the way of others for the moment.
            lease.release()
            self._busy(frame, link, "queue_full")
            return None
        key, deadline = task[:2], trio.current_time() + limit
        group = Group(key, wants, lease, self._room.join(), ttl, deadline, wish=self._choices.wish)
        self._groups[link, *key] = group
        link.start(task, self._run, group, link)
        self.on_change()
        return group

    def _validate(self, wants: Footprint) -> None:
        if wants.prompt_tokens < 1:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        if wants.max_tokens < 1:
            raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
        if not 1 <= wants.n <= self._slots.capacity:
            raise InvalidRequestError(f"n must be 1 to {self._slots.capacity}, the slots of this node", param="n")
        if wants.prompt_tokens + wants.max_tokens > self._max_len:
            raise InvalidRequestError(
                f"prompt and max_tokens are over the limit of {self._max_len} tokens", param="max_tokens"
            )
        if wants.pages(self._cache.page_size) > self._cache.num_pages:
            raise InvalidRequestError("prompt and max_tokens need more KV pages than the node has", param="max_tokens")

    def _busy(
        self, frame: Reserve | Decode | Group, link: LinkRequests, reason: BusyReason, *, count: bool = True
    ) -> None:
        if count:
            self._metrics.refused(reason)
        link.send(Busy(frame.id, frame.epoch, reason, self._waits.retry_after))

    async def _run(self, request: Request, group: Group, link: LinkRequests) -> None:
        """The group's own task, from the queue to the last recycled slot."""
        try:
            with group.lease, group.place:
                if await self._leased(request, group, link):
                    seqs = await self._admit(request, group, link)
                    if seqs is not None:
                        await self._choices.serve(request, group, seqs, link)
        finally:
            self._groups.pop((link, *group.key), None)
            self.on_change()

    async def _leased(self, request: Request, group: Group, link: LinkRequests) -> bool:
        """Wait for the lease, and for a reservation's first claim. False: refused, or expired."""
        request.enter("admission")
        with trio.move_on_at(group.deadline):
            await group.lease.wait()
        if not group.lease.granted:
            self._timed_out(group, link)
            return False
        return group.ttl is None or await self._committed(request, group, group.ttl, link)

    async def _committed(self, request: Request, group: Group, ttl: float, link: LinkRequests) -> bool:
        """Tell the Master that the slots are held, and until when the claim can come."""
        request.enter("reserved")
        link.send(Reserved(group.id, group.epoch, group.lease.waited))
        self._reserved += group.n
        outcome: ReservationOutcome = "cancelled"
        try:
            with trio.move_on_at(group.lease.granted_at + ttl):
                await group.committed.wait()
            outcome = "claimed" if group.committed.is_set() else "expired"
        finally:
            self._reserved -= group.n
            self._metrics.reservation_ended(outcome)
        if outcome == "expired":
            del self._groups[link, *group.key]  # before anything else can run: a late claim finds nothing
        return outcome == "claimed"

    async def _admit(self, request: Request, group: Group, link: LinkRequests) -> list[Sequence] | None:
        """Slots and pages for all choices within the admission deadline; None: refused, and told so."""
        request.enter("room")
        started = trio.current_time()
        with trio.move_on_at(group.deadline):
            await group.place.wait()
        room = group.place.take()
        if room is None:
            self._timed_out(group, link)
            return None
        waited = group.lease.waited + trio.current_time() - started
        self._waits.add(waited)
        self._metrics.admitted(waited)
        link.send(Admitted(group.id, group.epoch, waited=waited))
        recycled: list[Callable[[], None]] = [partial(self._recycled, lease) for lease in group.lease.split()]
        return self._choices.allot(group.first, room, recycled)

    def _timed_out(self, group: Group, link: LinkRequests) -> None:
        self._waits.add(trio.current_time() - group.arrived)
        self._busy(group, link, "timeout")

    def _recycled(self, lease: SubLease) -> None:
        lease.release()
        self._room.pump()
        self.on_change()
