"""A running Master: the registry, the node links, the coordinator. Imports neither torch nor nixl."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from pdserve.errors import ConfigError
from pdserve.ids import RequestIds, new_incarnation
from pdserve.master.coordinator import Coordinator
from pdserve.master.links import NodeLinks
from pdserve.master.registry import Registry
from pdserve.master.selector import Selector
from pdserve.master.service import Readiness
from pdserve.nurseries.tree import snapshot
from pdserve.telemetry.listener import Listener
from pdserve.wire.footprint import Footprint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from socket import socket

    from pdserve.config import MasterConfig
    from pdserve.master.output import GenerationOutput
    from pdserve.master.service import GenerationRequest
    from pdserve.telemetry.metrics import MasterMetrics
    from pdserve.wire.messages import ModelCard


@attrs.define(eq=False)
class Master:
    """Implements `service.MasterService`."""

    registry: Registry
    coordinator: Coordinator
    own_card: ModelCard
    draining: bool = False

    @property
    def card(self) -> ModelCard:
        limit = min([self.own_card.max_len, *(node.hello.model.max_len for node in self.registry.nodes())])
        return msgspec.structs.replace(self.own_card, max_len=limit)

    @property
    def max_capacity(self) -> int:
        return max((node.hello.capacity for node in self.registry.nodes("decode")), default=0)

    def output_room(self, prompt_tokens: int, n: int) -> int:
        """By what the nodes report of their KV pages; a node that has not reported yet sets no limit."""
        rooms = [
            Footprint.longest_output(prompt_tokens, n, pages=node.pages, page_size=node.hello.layout.page_size)
            for node in self.registry.nodes("decode")
            if node.pages is not None and node.hello.capacity >= n
        ]
        return max(1, max(rooms, default=self.own_card.max_len))

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[GenerationOutput]:
        return self.coordinator.generate(request)

    def readiness(self) -> Readiness:
        """Ready: not draining, and at least one Prefill and one Decode node that can work together."""
        prefills, decodes = self.registry.nodes("prefill"), self.registry.nodes("decode")
        reasons = ["draining"] if self.draining else []
        reasons += [
            f"no {role} node is registered" for role, found in (("Prefill", prefills), ("Decode", decodes)) if not found
        ]
        layouts = {node.hello.layout for node in prefills if not node.stats.draining}
        pairs = [node for node in decodes if node.hello.layout in layouts and not node.stats.draining]
        if prefills and decodes and not pairs:
            reasons.append("no Decode node has the KV layout of a Prefill node, or all drain")
        for node in decodes:
            if layouts and node.hello.layout not in layouts:
                reasons.append(f"decode {node.node_id} is unmatched: no Prefill node with its KV layout")
        reasons += self.registry.absent.reasons(trio.current_time())
        return Readiness(bool(pairs) and not self.draining, tuple(reasons), tuple(self._describe()))

    def tree(self) -> dict[str, Any]:
        return {"requests": self.coordinator.snapshot(), "nodes": self._describe(), "tasks": snapshot()}

    def _describe(self) -> list[dict[str, Any]]:
        return [
            {
                "node": node.node_id,
                "role": node.role,
                "incarnation": node.hello.incarnation,
                "generation": node.generation,
                "capacity": node.hello.capacity,
                "status_url": node.hello.status_url,
                "requests": len(node.mailboxes),
                **msgspec.structs.asdict(node.stats),
            }
            for node in self.registry.nodes()
        ]


@asynccontextmanager
async def open_master(
    config: MasterConfig, card: ModelCard, metrics: MasterMetrics, listeners: Sequence[socket]
) -> AsyncIterator[Master]:
    """A Master that accepts nodes on `listeners` while the context lasts; leaving ends requests, then links.

    Owns `listeners` from the call on. Raises ConfigError, before anything is accepted, for an unusable certificate.
    """
    streams = _stream_listeners(config, listeners)
    registry, incarnation = Registry(), new_incarnation()
    links = NodeLinks(
        registry,
        metrics,
        card,
        incarnation,
        token=config.cluster_token,
        heartbeat_interval=config.heartbeat_interval,
        need_admission=not config.disable_admission,
    )
    async with trio.open_nursery() as link_nursery:
        await link_nursery.start(trio.serve_listeners, links.handle, streams)
        async with trio.open_nursery() as request_nursery:
            coordinator = Coordinator(
                registry,
                Selector(),
                RequestIds(incarnation),
                metrics,
                request_nursery,
                admission_timeout=None if config.disable_admission else config.admission_timeout,
                reservation_ttl=config.reservation_ttl,
                total_deadline=config.total_deadline,
                retry=config.retry,
            )
            yield Master(registry, coordinator, card)
            request_nursery.cancel_scope.cancel()
        link_nursery.cancel_scope.cancel()


def _stream_listeners(
    config: MasterConfig, sockets: Sequence[socket]
) -> list[Listener] | list[trio.SSLListener[trio.SocketStream]]:
    tls = None
    if config.link_tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            tls.load_cert_chain(config.link_tls_cert, config.link_tls_key)
        except OSError as error:  # ssl.SSLError is one
            for sock in sockets:
                sock.close()
            raise ConfigError(
                f"cannot use --link-tls-cert {config.link_tls_cert} with --link-tls-key {config.link_tls_key}: {error}"
            ) from error
    plain = [Listener(sock) for sock in sockets]
    return plain if tls is None else [trio.SSLListener(listener, tls) for listener in plain]
