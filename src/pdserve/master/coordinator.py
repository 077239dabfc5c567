"""One request through Prefill and Decode: one scope, within which everything the request uses is given back."""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from pdserve.errors import DeadlineExceededError, NoWorkersError, RequestError, ServerBusyError, WorkerFailedError
from pdserve.master.attempt import Attempt, AttemptLostError
from pdserve.master.output import GenerationOutput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from pdserve.ids import RequestIds
    from pdserve.master.registry import Registry
    from pdserve.master.selector import Selector
    from pdserve.master.service import GenerationRequest
    from pdserve.telemetry.metrics import MasterMetrics

log = logging.getLogger("pdserve.coordinator")


@attrs.define(eq=False)
class _Request:
    id: str
    spec: GenerationRequest
    output: GenerationOutput
    scope: trio.CancelScope
    phase: str = "queued"
    since: float = attrs.field(factory=trio.current_time)
    nodes: tuple[str, ...] = ()
    left: bool = False
    """Nothing more is wanted of it."""

    def enter(self, phase: str, nodes: tuple[str, ...]) -> None:
        self.phase, self.nodes, self.since = phase, nodes, trio.current_time()

    def leave(self) -> None:
        self.left = True
        self.scope.cancel()


class Coordinator:
    """Runs requests in the Master's request nursery.

    `admission_timeout` bounds the wait for Decode (None: Decode is not asked to admit), `reservation_ttl` how long it
    keeps slots that were granted for several choices, `total_deadline` the whole request from its HTTP accept; `retry`:
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
        reservation_ttl: float = 5.0,
        total_deadline: float = math.inf,
        retry: bool = True,
    ) -> None:
        self._registry = registry
        self._selector = selector
        self._ids = ids
        self._metrics = metrics
        self._nursery = nursery
        self._admission_timeout = admission_timeout
        self._reservation_ttl = reservation_ttl
        self._total_deadline = total_deadline
        self._retry = retry
        self._requests: dict[str, _Request] = {}
        self.idle = trio.Event()
        self.idle.set()

    @asynccontextmanager
    async def generate(self, spec: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """The request's scope: leaving it, however, cancels the work on both nodes and forgets the request."""
        scope = trio.CancelScope(deadline=spec.accepted_at + self._total_deadline)
        request = _Request(self._ids.next(), spec, GenerationOutput(len(spec.prompt_ids), spec.n), scope)
        self._requests[request.id] = request
        self.idle = trio.Event() if len(self._requests) == 1 else self.idle
        self._nursery.start_soon(self._drive, request, name=f"request {request.id} ({spec.label})")
        try:
            yield request.output
        finally:
            request.leave()

    def abort(self) -> None:
        """End every request with an error, which its client is told, and the work for it on the nodes."""
        for request in self._requests.values():
            request.output.fail(NoWorkersError("this server was stopped before the answer was complete"))
            request.leave()

    def snapshot(self) -> list[dict[str, Any]]:
        now = trio.current_time()
        return [
            {
                "id": r.id,
                "label": r.spec.label,
                "phase": r.phase,
                "seconds": round(now - r.since, 3),
                "n": r.spec.n,
                "nodes": list(r.nodes),
            }
            for r in self._requests.values()
        ]

    async def _drive(self, request: _Request) -> None:
        """The request's own task: its failure becomes the output's error, never a silent end."""
        try:
            with request.scope:
                await self._attempts(request)
            if request.scope.cancelled_caught and not request.left:
                raise DeadlineExceededError(f"the request took over {self._total_deadline:g} s")
        except RequestError as error:
            if isinstance(error, ServerBusyError):
                self._metrics.refused(error.reason)
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
        admission_left = self._admission_timeout
        for epoch in (1, 2):
            attempt = self._attempt(request, epoch, avoid, admission_left)
            try:
                async with attempt:
                    await attempt.run()
                return
            except AttemptLostError as lost:
                if epoch == 2 or request.output.started or not self._retry:
                    raise WorkerFailedError(f"a node was lost while it served this request ({lost})") from lost
                avoid.add(lost.node.node_id)
                if admission_left is not None:
                    admission_left -= attempt.admission_seconds
                self._metrics.retried("node_lost")
                log.warning("request %s: %s; trying once more", request.id, lost)

    def _attempt(
        self, request: _Request, epoch: int, avoid: Collection[str], admission_timeout: float | None
    ) -> Attempt:
        return Attempt(
            (request.id, epoch),
            request.spec,
            request.output,
            self._registry,
            self._selector,
            avoid=frozenset(avoid),
            admission_timeout=admission_timeout,
            reservation_ttl=self._reservation_ttl,
            on_phase=request.enter,
        )
