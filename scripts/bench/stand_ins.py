"""A Master's coordinator over a Prefill and a Decode stand-in: real requests and a real pool, no sockets, no engine."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from watched_pool import WatchedPool

from pdserve.admission.lease import Lease
from pdserve.admission.pool import QueueFullError
from pdserve.ids import RequestIds, new_incarnation
from pdserve.master.coordinator import Coordinator
from pdserve.master.registry import Registry
from pdserve.master.selector import Selector
from pdserve.telemetry.metrics import MasterMetrics
from pdserve.wire.messages import (
    Admitted,
    Busy,
    Decode,
    Delta,
    FirstToken,
    Hello,
    KvLayout,
    ModelCard,
    Prefill,
    Prefilled,
    TransferMetadata,
)
from pdserve.worker.requests import LinkRequests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import msgspec

    from pdserve.master.registry import Node
    from pdserve.wire.messages import Role
    from pdserve.worker.requests import Request


class Wire:
    """In place of a connection and its outbox: frames of the node go to the mailbox that the Master's reader would
    have found, and the node's request tasks are children of `nursery`.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.node: Node

    def start_soon(self, fn: Callable[..., Awaitable[object]], *args: Any, name: str) -> None:  # noqa: ANN401
        self._nursery.start_soon(fn, *args, name=name)

    def control(self, frame: Any) -> None:  # noqa: ANN401
        mailbox = self.node.mailboxes.get((frame.id, frame.epoch))
        if mailbox is not None:
            mailbox.deliver(self.node, frame)

    def data(self, key: object, frame: object, merge: object) -> None:
        self.control(frame)

    def discard(self, key: object) -> None:
        """Nothing waits here."""


class PrefillStandIn:
    """Has computed every prompt already."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def take(self, frame: msgspec.Struct) -> None:
        if isinstance(frame, Prefill):
            self._wire.control(Prefilled(frame.id, frame.epoch, b"", (FirstToken(65),), len(frame.token_ids)))


class DecodeStandIn:
    """Admits as `worker.decode` does; then the request holds its slot for `busy` seconds, independent of all others."""

    def __init__(self, wire: Wire, pool: WatchedPool, busy: float) -> None:
        self._link = LinkRequests(wire, wire)  # type: ignore[arg-type]
        self.pool = pool
        self._busy = busy
        self.waits: list[float] = []
        """Seconds in the queue, of every request that was admitted."""

    def take(self, frame: msgspec.Struct) -> None:
        """The ticket is drawn before anything else can run; the rest is the request's own task."""
        if not isinstance(frame, Decode):
            return
        try:
            lease = Lease(self.pool)
        except QueueFullError:
            self._link.send(Busy(frame.id, frame.epoch, "queue_full"))
            return
        self._link.start((frame.id, frame.epoch, 0), self._run, frame, lease)

    async def _run(self, request: Request, frame: Decode, lease: Lease) -> None:
        with lease:
            assert frame.admission_timeout is not None
            with trio.move_on_after(frame.admission_timeout):
                await lease.wait()
            if not lease.granted:
                self._link.send(Busy(frame.id, frame.epoch, "timeout"))
                return
            self.waits.append(lease.waited)
            self._link.send(Admitted(frame.id, frame.epoch, waited=lease.waited))
            await trio.sleep(self._busy)
            self._link.emit(Delta(frame.id, frame.epoch, 0, (65, 66), "AB", finish="length"))


@asynccontextmanager
async def open_stand_ins(*, slots: int, queue: int, busy: float) -> AsyncIterator[tuple[Coordinator, DecodeStandIn]]:
    registry = Registry()
    async with trio.open_nursery() as nursery:
        wires = Wire(nursery), Wire(nursery)
        prefill, decode = PrefillStandIn(wires[0]), DecodeStandIn(wires[1], WatchedPool(slots, queue), busy)
        with (
            registry.registered(_hello("prefill", slots), prefill.take, lambda reason: None) as wires[0].node,
            registry.registered(_hello("decode", slots), decode.take, lambda reason: None) as wires[1].node,
        ):
            async with trio.open_nursery() as requests:  # ends before a node is missed
                ids = RequestIds(new_incarnation())
                yield Coordinator(registry, Selector(), ids, MasterMetrics(), requests, admission_timeout=5.0), decode
                requests.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


def _hello(role: Role, capacity: int) -> Hello:
    return Hello(
        protocol_min=1,
        protocol_max=1,
        role=role,
        node_id=role,
        incarnation=new_incarnation(),
        model=ModelCard("stand-in", "", "", 4096),
        layout=KvLayout(16, 128, layers=1, kv_heads=1, head_dim=1, dtype="sim"),
        transfer=TransferMetadata(role, b"", b""),
        capacity=capacity,
    )
