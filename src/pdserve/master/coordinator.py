"""One request through Prefill and Decode: one scope, within which everything the request uses is given back."""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from pdserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoWorkersError,
    RequestError,
    ServerBusyError,
    WorkerFailedError,
)
from pdserve.master.mailbox import AttemptMailbox, NodeLost
from pdserve.master.output import GenerationOutput
from pdserve.wire.messages import (
    Admitted,
    Busy,
    Cancel,
    Decode,
    Delta,
    Failed,
    Prefill,
    Prefilled,
    Release,
    Renew,
    Settled,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.ids import RequestIds
    from pdserve.master.registry import Node, Registry
    from pdserve.master.selector import Selector
    from pdserve.master.service import GenerationRequest
    from pdserve.telemetry.metrics import MasterMetrics

log = logging.getLogger("pdserve.coordinator")

_RENEW_INTERVAL = 1.0
"""Seconds between renewals of P's hold: the Master does not know P's `--hold-timeout`, which may be a few seconds."""


class _AttemptLostError(Exception):
    """A node of the attempt was lost; before any output another attempt may follow."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(f"{node.role} node {node.node_id}: {reason}")
        self.node = node


@attrs.define(eq=False)
class _Request:
    id: str
    spec: GenerationRequest
    output: GenerationOutput
    phase: str = "queued"
    since: float = attrs.field(factory=trio.current_time)
    nodes: tuple[str, ...] = ()

    def enter(self, phase: str) -> None:
        self.phase, self.since = phase, trio.current_time()


class Coordinator:
    """Runs requests in the Master's request nursery.

    `admission_timeout` bounds the wait for Decode, `total_deadline` the whole request from its HTTP accept; `retry`:
    one further attempt when a node is lost before the first output.
    """

    def __init__(
        self,
        registry: Registry,
        selector: Selector,
        ids: RequestIds,
        metrics: MasterMetrics,
        nursery: trio.Nursery,
        *,
        admission_timeout: float | None,
        total_deadline: float = math.inf,
        retry: bool = True,
    ) -> None:
        self._registry = registry
        self._selector = selector
        self._ids = ids
        self._metrics = metrics
        self._nursery = nursery
        self._admission_timeout = admission_timeout
        self._total_deadline = total_deadline
        self._retry = retry
        self._requests: dict[str, _Request] = {}
        self.idle = trio.Event()
        self.idle.set()

    @asynccontextmanager
    async def generate(self, spec: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """The request's scope: leaving it, however, cancels the work on both nodes and forgets the request."""
        request = _Request(self._ids.next(), spec, GenerationOutput(len(spec.prompt_ids)))
        scope = trio.CancelScope()
        self._requests[request.id] = request
        self.idle = trio.Event() if len(self._requests) == 1 else self.idle
        self._nursery.start_soon(self._drive, request, scope, name=f"request {request.id} ({spec.label})")
        try:
            yield request.output
        finally:
            scope.cancel()

    def snapshot(self) -> list[dict[str, Any]]:
        now = trio.current_time()
        return [
            {
                "id": r.id,
                "label": r.spec.label,
                "phase": r.phase,
                "seconds": round(now - r.since, 3),
                "nodes": list(r.nodes),
            }
            for r in self._requests.values()
        ]

    async def _drive(self, request: _Request, scope: trio.CancelScope) -> None:
        """The request's own task: its failure becomes the output's error, never a silent end."""
        try:
            with scope, trio.move_on_at(request.spec.accepted_at + self._total_deadline) as deadline:
                await self._attempts(request)
            if deadline.cancelled_caught:
                raise DeadlineExceededError(f"the request took over {self._total_deadline:g} s")
        except RequestError as error:
            request.output.fail(error)
        except Exception:
            log.exception("request %s (%s) failed in the Master", request.id, request.spec.label)
            request.output.fail(WorkerFailedError("the Master failed while serving this request"))
        finally:
            del self._requests[request.id]
            if not self._requests:
                self.idle.set()

    async def _attempts(self, request: _Request) -> None:
        avoid: set[str] = set()
        for epoch in (1, 2):
            try:
                async with _Attempt(self, request, epoch, frozenset(avoid)) as attempt:
                    await attempt.run()
                return
            except _AttemptLostError as lost:
                if epoch == 2 or request.output.started or not self._retry:
                    raise WorkerFailedError(f"a node was lost while it served this request ({lost})") from lost
                avoid.add(lost.node.node_id)
                self._metrics.retried("node_lost")
                log.warning("request %s: %s; trying once more", request.id, lost)


class _Attempt:
    """One try of a request on one P and one D node; leaving it tells both nodes to give everything back."""

    def __init__(self, owner: Coordinator, request: _Request, epoch: int, avoid: frozenset[str]) -> None:
        self._owner = owner
        self._request = request
        self._avoid = avoid
        self._mailbox = AttemptMailbox()
        self._key = (request.id, epoch)
        self._prefill: Node | None = None
        self._decode: Node | None = None

    async def __aenter__(self) -> _Attempt:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Synchronous sends into the links' outboxes: nothing to wait for, so no shield is needed.
        if self._decode is not None:
            self._part(self._decode, Cancel(*self._key))
        if self._prefill is not None:
            self._part(self._prefill, Cancel(*self._key))

    async def run(self) -> None:
        request = self._request
        request.enter("prefill")
        prefilled = await self._prefilled()
        request.output.cached_tokens = prefilled.cached_tokens
        request.enter("admission")
        await self._admitted(prefilled)
        request.enter("decode")
        while not await self._relay():
            pass
        self._leave(self._decode)
        self._decode = None

    def _choose(self, full: frozenset[str] = frozenset()) -> tuple[Node, Node]:
        registry, selector, spec = self._owner._registry, self._owner._selector, self._request.spec
        prefills, decodes = registry.nodes("prefill"), registry.nodes("decode")
        if not decodes or not prefills:
            raise NoWorkersError(f"no {'Decode' if prefills else 'Prefill'} node is registered")
        prefill = self._prefill or selector.prefill(prefills, spec.prompt_ids, self._avoid)
        if prefill is None:
            raise NoWorkersError("every Prefill node drains")
        if all(node.hello.capacity < spec.n for node in decodes):
            most = max(node.hello.capacity for node in decodes)
            raise InvalidRequestError(f"n must be at most {most}, the largest capacity of a Decode node", param="n")
        decode = selector.decode(decodes, prefill, spec.n, self._avoid | full)
        if decode is None:
            raise NoWorkersError("no Decode node with the KV layout of a Prefill node takes requests")
        return prefill, decode

    async def _prefilled(self) -> Prefilled:
        """Ask P; one that has begun to drain is passed over."""
        spec = self._request.spec
        while True:
            prefill, _ = self._choose()
            self._prefill = self._join(prefill)
            self._request.nodes = (prefill.node_id,)
            prefill.assigned_tokens += len(spec.prompt_ids)
            prefill.send(Prefill(*self._key, spec.prompt_ids, spec.params, spec.n))
            match await self._next():
                case Prefilled() as frame:
                    return frame
                case Busy() as busy:
                    self._leave(prefill)
                    self._prefill = None
                    if busy.reason == "draining":
                        _drains(prefill)
                        continue
                    raise ServerBusyError(
                        "the prefill queue is full, try again later",
                        reason=busy.reason,
                        retry_after=busy.retry_after,
                    )
                case frame:
                    raise WorkerFailedError(f"unexpected {type(frame).__name__} before the prompt was computed")

    async def _admitted(self, prefilled: Prefilled) -> None:
        """Ask D; when it is full, one other D within what is left of the admission deadline."""
        started = trio.current_time()
        full: frozenset[str] = frozenset()
        while True:
            _, decode = self._choose(full)
            self._decode = self._join(decode)
            self._request.nodes = (self._request.nodes[0], decode.node_id)
            timeout = self._owner._admission_timeout
            left = None if timeout is None else max(0.0, timeout - (trio.current_time() - started))
            first = prefilled.first[0] if prefilled.first else None
            spec = self._request.spec
            decode.send(
                Decode(*self._key, spec.prompt_ids, spec.params, prefilled.handle, first, 0, admission_timeout=left)
            )
            match await self._next():
                case Admitted():
                    return
                case Busy() as busy:
                    self._leave(decode)
                    self._decode = None
                    if busy.reason == "draining":
                        _drains(decode)
                        continue
                    others = [n for n in self._owner._registry.nodes("decode") if n.node_id != decode.node_id]
                    if full or busy.reason == "timeout" or not others:
                        raise ServerBusyError(
                            "Decode is full, try again later", reason=busy.reason, retry_after=busy.retry_after
                        )
                    full = frozenset({decode.node_id})
                case frame:
                    raise WorkerFailedError(f"unexpected {type(frame).__name__} before admission")

    async def _relay(self) -> bool:
        """Handle one frame of the running generation; True at its end."""
        match await self._next():
            case Delta() as delta:
                self._request.output.put(delta)
                return delta.finish is not None
            case Settled():
                if self._prefill is not None:
                    self._part(self._prefill, Release(*self._key))
                    self._prefill = None
        return False

    async def _next(self) -> msgspec.Struct:
        """The next frame of this attempt; renews P's hold while nothing comes. Raises what a `Failed` frame tells."""
        while True:
            with trio.move_on_after(_RENEW_INTERVAL):
                frame = await self._mailbox.next()
                if isinstance(frame, NodeLost):
                    # A node that this attempt no longer needs may go.
                    if frame.node in (self._prefill, self._decode):
                        raise _AttemptLostError(frame.node, frame.reason)
                    continue
                if isinstance(frame, Failed):
                    raise _error_of(frame)
                return frame
            if self._prefill is not None:
                self._prefill.send(Renew(*self._key))

    def _join(self, node: Node) -> Node:
        if not self._owner._registry.is_current(node):
            raise _AttemptLostError(node, "lost")
        node.mailboxes[self._key] = self._mailbox
        return node

    def _leave(self, node: Node | None) -> None:
        if node is not None:
            node.mailboxes.pop(self._key, None)

    def _part(self, node: Node, farewell: msgspec.Struct) -> None:
        self._leave(node)
        node.send(farewell)


def _drains(node: Node) -> None:
    """The node has said so in an answer, ahead of its next report: nothing is sent there any more."""
    node.stats = msgspec.structs.replace(node.stats, draining=True)


def _error_of(frame: Failed) -> RequestError:
    if frame.code == InvalidRequestError.code:
        return InvalidRequestError(frame.message, param=frame.param)
    return WorkerFailedError(frame.message)
