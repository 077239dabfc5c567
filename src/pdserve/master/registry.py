"""Who is registered with this Master. A connection owns exactly the registration that it made."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Protocol

import attrs

from pdserve.master.absent import Absences
from pdserve.wire.messages import NodeStats, PeerDown, PeerUp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import msgspec

    from pdserve.wire.footprint import Footprint
    from pdserve.wire.messages import Hello, Role


class Mailbox(Protocol):
    """Where the frames of one attempt of a request go. Both calls are synchronous and never fail."""

    def deliver(self, node: Node, frame: msgspec.Struct) -> None: ...

    def lost(self, node: Node, reason: str) -> None: ...


@attrs.define(eq=False)
class Node:
    """One registration: a node in one of its lives, over one connection."""

    hello: Hello
    generation: int
    send: Callable[[msgspec.Struct], None]
    close: Callable[[str], None]
    stats: NodeStats = attrs.field(factory=NodeStats)
    mailboxes: dict[tuple[str, int], Mailbox] = attrs.field(factory=dict)
    """By (request id, epoch): the requests assigned to this node."""
    assigned_tokens: int = 0
    """Prompt tokens sent since the node's last report: keeps a burst from all going to one Prefill node."""

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def node_id(self) -> str:
        return self.hello.node_id

    @property
    def pages(self) -> int | None:
        """KV pages in all; None before the node's first report."""
        stats = self.stats
        return (stats.pages_free + stats.pages_cached + stats.pages_pinned + stats.pages_quarantined) or None

    def holds(self, request: Footprint) -> bool:
        """Whether an empty node has the pages for the request."""
        pages = self.pages
        return pages is None or request.pages(self.hello.layout.page_size) <= pages

    def fits(self, request: Footprint) -> bool:
        """Whether an empty Decode node could take the request; it alone decides whether it does now."""
        return self.holds(request) and request.n <= self.hello.capacity


class Registry:
    """The nodes by id, the newest registration of each. No awaits: every change is complete when a call returns."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._generations = count(1)
        self.absent = Absences()

    def nodes(self, role: Role | None = None) -> list[Node]:
        return [node for node in self._nodes.values() if role is None or node.role == role]

    def is_current(self, node: Node) -> bool:
        return self._nodes.get(node.node_id) is node

    @contextmanager
    def registered(
        self, hello: Hello, send: Callable[[msgspec.Struct], None], close: Callable[[str], None]
    ) -> Iterator[Node]:
        """Register for as long as the context lasts. An older registration of the same node is closed with a reason and
        its requests are woken at once; leaving a context that has been replaced changes nothing.
        """
        node = Node(hello, next(self._generations), send, close)
        older = self._nodes.get(node.node_id)
        if older is not None:
            self._remove(older, "replaced by a newer registration")
            older.close("replaced by a newer registration")
        self._nodes[node.node_id] = node
        self.absent.forget(node.node_id)
        try:
            yield node
        finally:
            if self.is_current(node):
                self._remove(node, "lost")

    def introduce(self, node: Node) -> None:
        """Make the node and its possible peers (other role, same KV layout) known to each other."""
        for peer in self.nodes():
            if peer.role != node.role and peer.hello.layout == node.hello.layout:
                peer.send(PeerUp(node.node_id, node.hello.incarnation, node.hello.transfer))
                node.send(PeerUp(peer.node_id, peer.hello.incarnation, peer.hello.transfer))

    def _remove(self, node: Node, reason: str) -> None:
        del self._nodes[node.node_id]
        for peer in self.nodes():
            if peer.role != node.role and peer.hello.layout == node.hello.layout:
                peer.send(PeerDown(node.node_id, node.hello.incarnation))
        mailboxes, node.mailboxes = node.mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.lost(node, reason)
