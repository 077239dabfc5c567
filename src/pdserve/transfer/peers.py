"""Which transfer peers are admitted to the agent. No I/O, no clock: the owner performs the actions and reports back."""

from __future__ import annotations

import attrs


@attrs.frozen
class Add:
    agent: str
    blob: bytes


@attrs.frozen
class Remove:
    agent: str


@attrs.define
class _Peer:
    agent: str
    node_id: str
    blob: bytes
    links: set[object] = attrs.field(factory=set)
    in_flight: int = 0
    admitted: bool = False
    wanted: bool = True
    broken: bool = False
    """The agent has reported it as disconnected: it has to be removed before it can be admitted again."""
    busy: bool = False
    """An `Add` or `Remove` is under way."""


class PeerTable:
    """Peers by agent name, that is by incarnation, with the links that report them and what is in flight.

    An admitted peer is removed, as soon as nothing is in flight, when it disconnected, when a newer incarnation of its
    node has been reported, or when no link reports it. Its metadata stays known for as long as a link reports it, so
    that demand (`want`) or a new report admits it again.
    """

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._touched: dict[str, None] = {}
        """Peers whose next action may have changed, in order."""

    def __len__(self) -> int:
        """How many peers are admitted."""
        return sum(peer.admitted for peer in self._peers.values())

    # --- what links report

    def seen(self, agent: str, link: object, *, node_id: str, blob: bytes) -> None:
        """`link` reports the peer. It replaces what the same link reported of other incarnations of the node."""
        peer = self._peers.get(agent)
        newer = peer is None
        if peer is None:
            peer = self._peers[agent] = _Peer(agent, node_id, blob)
        for other in self._peers.values():
            if other is not peer and other.node_id == node_id:
                # A link whose Master is slow may report an incarnation that is older than what is known: only what
                # this link itself said before is taken back. The other stays known, in case it is the living one.
                other.links.discard(link)
                other.wanted = other.wanted and not newer
                self._touch(other)
        peer.links.add(link)
        peer.wanted = True
        if not peer.admitted and not peer.busy:
            peer.blob = blob
        self._touch(peer)

    def gone(self, agent: str, link: object) -> None:
        """`link` no longer reports the peer."""
        if (peer := self._peers.get(agent)) is not None:
            peer.links.discard(link)
            self._touch(peer)

    def node_gone(self, node_id: str, incarnation: str, link: object) -> None:
        """As `gone`, for the agent of that incarnation: the one whose name contains it."""
        for peer in self._peers.values():
            if peer.node_id == node_id and incarnation in peer.agent:
                self.gone(peer.agent, link)

    def link_lost(self, link: object) -> None:
        """`link` no longer reports anything."""
        for peer in self._peers.values():
            self.gone(peer.agent, link)

    # --- what the owner needs

    def known(self, agent: str) -> bool:
        """A link reports that peer, or it is admitted: its metadata has been authenticated."""
        return agent in self._peers

    def usable(self, agent: str) -> bool:
        """Transfers with the peer can be started now."""
        peer = self._peers.get(agent)
        return peer is not None and peer.admitted and not peer.broken and not peer.busy

    def want(self, agent: str) -> None:
        """Somebody waits for the peer: admit it again if it is known."""
        peer = self._peers.get(agent)
        if peer is not None and not peer.wanted:
            peer.wanted = True
            self._touch(peer)

    def begin(self, agent: str) -> None:
        """One more transfer in flight; the peer is usable."""
        self._peers[agent].in_flight += 1

    def end(self, agent: str) -> None:
        """One transfer less in flight."""
        peer = self._peers[agent]
        if peer.in_flight < 1:
            raise RuntimeError(f"peer {agent} has nothing in flight")
        peer.in_flight -= 1
        self._touch(peer)

    def disconnected(self, agent: str) -> bool:
        """The agent found the peer disconnected; True if that is new. It comes back on demand or on a new report."""
        peer = self._peers.get(agent)
        if peer is None or not peer.admitted or peer.broken:
            return False
        peer.broken = True
        peer.wanted = False
        self._touch(peer)
        return True

    # --- actions

    def actions(self) -> list[Add | Remove]:
        """What the owner has to do now. Each is answered by `added`, `add_failed` or `removed`."""
        todo: list[Add | Remove] = []
        touched, self._touched = self._touched, {}
        for agent in touched:
            peer = self._peers.get(agent)
            if peer is None or peer.busy:
                continue
            if peer.admitted:
                if peer.in_flight == 0 and (peer.broken or not peer.wanted or not peer.links):
                    peer.busy = True
                    todo.append(Remove(agent))
            elif not peer.links:
                del self._peers[agent]
            elif peer.wanted:
                peer.busy = True
                todo.append(Add(agent, peer.blob))
        return todo

    def added(self, agent: str) -> None:
        peer = self._peers[agent]
        peer.busy = False
        peer.admitted = True
        self._touch(peer)

    def add_failed(self, agent: str) -> None:
        """The agent refused the peer; tried again on demand or when it is reported again."""
        peer = self._peers[agent]
        peer.busy = False
        peer.wanted = False
        self._touch(peer)

    def removed(self, agent: str) -> None:
        peer = self._peers[agent]
        peer.busy = peer.admitted = peer.broken = False
        self._touch(peer)

    def _touch(self, peer: _Peer) -> None:
        self._touched[peer.agent] = None
