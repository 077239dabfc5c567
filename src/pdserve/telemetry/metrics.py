"""Prometheus metrics of a Master and of a worker. Every instance has its own registry; there is no global state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.wire.messages import NodeStats

Outcome = Literal["ok", "client_gone", "busy", "invalid", "failed", "deadline", "unavailable"]
"""How a request ended. Exactly one each."""
ReservationOutcome = Literal["claimed", "expired", "cancelled"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class _Metrics:
    """A registry and its text form. `refresh` is called right before each rendering, to set gauges."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, refresh: Callable[[], None] | None) -> None:
        self.registry = CollectorRegistry()
        self.refresh = refresh

    def render(self) -> bytes:
        """The exposition text of all series."""
        if self.refresh is not None:
            self.refresh()
        return bytes(generate_latest(self.registry))

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"pdserve_{name}", help_, labels, registry=self.registry)

    def _gauge(self, name: str, help_: str, *labels: str) -> Gauge:
        return Gauge(f"pdserve_{name}", help_, labels, registry=self.registry)

    def _histogram(self, name: str, help_: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"pdserve_{name}", help_, labels, buckets=buckets, registry=self.registry)


class MasterMetrics(_Metrics):
    """What a Master sees: its requests as their clients do, and the nodes that are linked to it."""

    def __init__(self, refresh: Callable[[], None] | None = None) -> None:
        super().__init__(refresh)
        self._requests = self._counter("requests", "Finished HTTP requests", "endpoint", "outcome")
        self._in_flight = self._gauge("requests_in_flight", "Requests between accept and end", "endpoint")
        self._ttft = self._histogram("ttft_seconds", "HTTP accept to first delta", "endpoint")
        self._itl = self._histogram(
            "itl_seconds",
            "Time between output tokens; a delta's gap counts evenly for its tokens",
            buckets=_STEP_SECONDS,
        )
        self._e2e = self._histogram("request_seconds", "HTTP accept to end of the response", "endpoint")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of admitted requests")
        self._cached = self._counter("cached_tokens", "Prompt tokens that Prefill took from its prefix cache")
        self._output = self._counter("output_tokens", "Output tokens received from Decode")
        self._retries = self._counter("retries", "Requests tried again on other nodes", "reason")
        self._refusals = self._counter("admission_refusals", "Requests answered with 429, once each", "reason")
        self._connects = self._counter("node_connects", "Nodes registered", "role")
        self._losses = self._counter("node_losses", "Node links lost", "role", "reason")
        self._node: dict[str, Gauge] = {
            name: self._gauge(f"node_{name}", help_, "node", "role")
            for name, help_ in (
                ("capacity", "Request slots"),
                ("active", "Leases held (decode) or prompts in work and held (prefill)"),
                ("queued", "Waiting slots (decode) or prompt tokens (prefill)"),
                ("reserved", "Leased slots of reservations that nobody has claimed yet (decode)"),
                ("transfers", "KV transfers running"),
                ("draining", "1 while the node takes nothing new"),
            )
        }
        self._node_pages = self._gauge("node_kv_pages", "KV pages by state", "node", "role", "state")
        self._roles: dict[str, str] = {}

    def request_started(self, endpoint: str) -> None:
        self._in_flight.labels(endpoint).inc()

    def request_finished(self, endpoint: str, outcome: Outcome, seconds: float) -> None:
        """Exactly once for each `request_started`; `seconds` from the HTTP accept."""
        self._in_flight.labels(endpoint).dec()
        self._requests.labels(endpoint, outcome).inc()
        self._e2e.labels(endpoint).observe(seconds)

    def first_delta(self, endpoint: str, seconds: float, *, prompt_tokens: int, cached_tokens: int) -> None:
        self._ttft.labels(endpoint).observe(seconds)
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)

    def output_tokens(self, count: int) -> None:
        self._output.inc(count)

    def inter_token(self, gap: float, count: int) -> None:
        """`count` tokens came `gap` seconds after the ones before."""
        for _ in range(count):
            self._itl.observe(gap / count)

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def refused(self, reason: str) -> None:
        """Once a request, however many nodes have refused it."""
        self._refusals.labels(reason).inc()

    def node_connected(self, role: str) -> None:
        self._connects.labels(role).inc()

    def node_lost(self, role: str, reason: str) -> None:
        self._losses.labels(role, reason).inc()

    def set_node(self, node: str, role: str, stats: NodeStats) -> None:
        """The node's gauges. A node that comes back in another role loses the series of the former one."""
        if self._roles.get(node, role) != role:
            self.forget_node(node)
        self._roles[node] = role
        for name, gauge in self._node.items():
            gauge.labels(node, role).set(float(getattr(stats, name)))
        for state, pages in _pages(stats).items():
            self._node_pages.labels(node, role, state).set(pages)

    def forget_node(self, node: str) -> None:
        """Remove the node's series. Idempotent."""
        role = self._roles.pop(node, None)
        if role is None:
            return
        for gauge in self._node.values():
            gauge.remove(node, role)
        for state in _PAGE_STATES:
            self._node_pages.remove(node, role, state)


class WorkerMetrics(_Metrics):
    """What one Prefill or Decode process does. Safe to call from the engine's thread."""

    def __init__(self, refresh: Callable[[], None] | None = None) -> None:
        super().__init__(refresh)
        self._leases = self._gauge("leases", "Slot leases", "state")
        self._slots_used = self._gauge("slots_used", "Physical request slots in use")
        self._slots_queued = self._gauge("slots_queued", "Slots waited for in the admission queue")
        self._pages = self._gauge("kv_pages", "KV pages by state", "state")
        self._transfers_running = self._gauge("transfers_running", "KV transfers running")
        self._transfers = self._counter("transfers", "Finished KV transfers", "outcome")
        self._holds = self._gauge("holds", "Prompts whose KV pages are held for Decode")
        self._wait = self._histogram("admission_wait_seconds", "Time in the admission queue until the grant")
        self._refusals = self._counter("refusals", "Requests not admitted", "reason")
        self._slots_reserved = self._gauge("slots_reserved", "Leased slots of reservations that nobody has claimed yet")
        self._reservations = self._counter("reservations", "Reservations granted, by how they ended", "outcome")
        self._steps = self._counter("steps", "Engine steps")
        self._step_seconds = self._histogram("step_seconds", "Duration of an engine step", buckets=_STEP_SECONDS)
        self._tokens = self._counter("tokens_generated", "Tokens sampled")
        self._gauge("restarts", "Times that the supervisor has restarted this process").set(_restarts())

    def set_leases(self, *, used: int, capacity: int) -> None:
        self._leases.labels("used").set(used)
        self._leases.labels("capacity").set(capacity)

    def set_slots(self, *, used: int, queued: int) -> None:
        self._slots_used.set(used)
        self._slots_queued.set(queued)

    def set_pages(self, *, free: int, cached: int, pinned: int, quarantined: int) -> None:
        for state, pages in zip(_PAGE_STATES, (free, cached, pinned, quarantined), strict=True):
            self._pages.labels(state).set(pages)

    def set_transfers(self, running: int) -> None:
        self._transfers_running.set(running)

    def set_holds(self, holds: int) -> None:
        self._holds.set(holds)

    def set_stats(self, stats: NodeStats) -> None:
        """All gauges that the node's own heartbeat carries."""
        self.set_leases(used=stats.active, capacity=stats.capacity)
        self._slots_queued.set(stats.queued)
        self._slots_reserved.set(stats.reserved)
        self.set_pages(**_pages(stats))
        self.set_transfers(stats.transfers)

    def admitted(self, waited: float) -> None:
        self._wait.observe(waited)

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def reservation_ended(self, outcome: ReservationOutcome) -> None:
        self._reservations.labels(outcome).inc()

    def transfer_finished(self, outcome: str) -> None:
        self._transfers.labels(outcome).inc()

    def step(self, seconds: float, tokens: int = 0) -> None:
        """One engine step and the tokens that it sampled."""
        self._steps.inc()
        self._step_seconds.observe(seconds)
        self._tokens.inc(tokens)


_PAGE_STATES = ("free", "cached", "pinned", "quarantined")


def _pages(stats: NodeStats) -> dict[str, int]:
    return {state: getattr(stats, f"pages_{state}") for state in _PAGE_STATES}


def _restarts() -> int:
    """`PDSERVE_RESTARTS`, set by the supervising process; 0 when unset or unusable."""
    value = os.environ.get("PDSERVE_RESTARTS", "")
    return int(value) if value.isdecimal() else 0
