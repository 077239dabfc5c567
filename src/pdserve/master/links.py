"""The Master's side of node links: handshake, registration, routing of frames. One bad node costs only itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio
from trio_websocket import ConnectionClosed, HandshakeError, wrap_server_stream

from pdserve.errors import ProtocolError
from pdserve.nurseries.connection import GOING_AWAY, NORMAL, POLICY, ConnectionLost, connection_scope
from pdserve.nurseries.ended import EndTold
from pdserve.nurseries.forwarder import Outbox
from pdserve.nurseries.groups import leaves
from pdserve.nurseries.heartbeat import Heartbeat, pace
from pdserve.nurseries.shelter import sheltered_nursery
from pdserve.wire.codec import MAX_FRAME_BYTES, RECEIVE_BYTES, decode_from_node, encode
from pdserve.wire.handshake import REPLACED, judge, master_proof, new_nonce
from pdserve.wire.messages import Challenge, Draining, Hello, NodeStats, Ping, Reject, Welcome

if TYPE_CHECKING:
    import msgspec
    from trio_websocket import WebSocketConnection

    from pdserve.ids import Incarnation
    from pdserve.master.registry import Node, Registry
    from pdserve.telemetry.metrics import MasterMetrics
    from pdserve.wire.messages import ModelCard

log = logging.getLogger("pdserve.links")

_HANDSHAKE_TIMEOUT = 10.0
_HEARTBEATS_MISSED = 3
_RECEIVE_QUEUE = 1024
_EXPECTED = (ConnectionClosed, HandshakeError, trio.TooSlowError, ProtocolError, OSError, trio.BrokenResourceError)


class NodeLinks:
    """Accepts nodes. `handle` never raises anything but cancellation."""

    def __init__(
        self,
        registry: Registry,
        metrics: MasterMetrics,
        card: ModelCard,
        incarnation: Incarnation,
        *,
        token: str,
        heartbeat_interval: float,
        need_admission: bool,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._card = card
        self._incarnation = incarnation
        self._token = token
        self._interval = heartbeat_interval
        self._need_admission = need_admission

    async def handle(self, stream: trio.abc.Stream) -> None:
        """One connection from its upgrade to its end; the border at which its failures stop.

        A nursery per connection, not trio-websocket's server: there an error in one reader task ends them all.
        """
        try:
            async with stream, sheltered_nursery() as nursery:
                with trio.move_on_after(_HANDSHAKE_TIMEOUT) as handshake:
                    request = await wrap_server_stream(
                        nursery,
                        EndTold(stream, handshake.cancel),
                        message_queue_size=_RECEIVE_QUEUE,
                        max_message_size=MAX_FRAME_BYTES,
                        receive_buffer_size=RECEIVE_BYTES,
                    )
                    ws = await request.accept()
                    agreed = await self._shake_hands(ws)
                if not handshake.cancelled_caught:
                    if agreed is not None:
                        await self._serve(ws, *agreed)
                elif trio.current_time() >= handshake.deadline:
                    log.warning("a node link did not get through its handshake in %g s", _HANDSHAKE_TIMEOUT)
                else:
                    log.debug("a connection to the node port was closed before its handshake")  # a probe, most likely
        except Exception as error:
            causes = list(leaves(error))
            if all(isinstance(cause, _EXPECTED) for cause in causes):
                log.warning("a node link ended in its handshake: %s", str(causes[0]) or type(causes[0]).__name__)
            else:
                log.exception("a node link failed")

    async def _shake_hands(self, ws: WebSocketConnection) -> tuple[Hello, int] | None:
        challenge = new_nonce()
        await ws.send_message(encode(Challenge(challenge, self._incarnation)))
        try:
            hello = decode_from_node(await ws.get_message())
        except ConnectionClosed as closed:
            if closed.reason is not None and closed.reason.code == NORMAL:
                return None  # another link of that node serves this Master
            raise
        if not isinstance(hello, Hello):
            raise ProtocolError(f"expected a hello, got {type(hello).__name__}")
        verdict = judge(
            hello, token=self._token, challenge=challenge, card=self._card, need_admission=self._need_admission
        )
        if isinstance(verdict, Reject):
            log.warning("refused %s node %s: %s", hello.role, hello.node_id, verdict.reason)
            if verdict.code != "unauthorised":  # whoever cannot prove the token gets no say in what we show
                reason = f"refused {hello.role} {hello.node_id}: {verdict.reason}"
                self._registry.absent.note(hello.node_id, reason, trio.current_time())
            await ws.send_message(encode(verdict))
            await ws.aclose(POLICY, verdict.code)
            return None
        return hello, verdict

    async def _serve(self, ws: WebSocketConnection, hello: Hello, version: int) -> None:
        outbox = Outbox(encode=encode, control_limit=65536)
        name = f"{hello.role} {hello.node_id}"
        closing: list[str] = []
        left = trio.Event()
        reason = "closed"

        def close(why: str) -> None:
            closing.append(why)
            left.set()

        try:
            async with connection_scope(
                ws,
                name=name,
                on_message=lambda message: self._on_message(node, message),  # called from the first checkpoint on
                outbox=outbox,
                heartbeat=Heartbeat(
                    pace(self._interval, hello.heartbeat_interval), _HEARTBEATS_MISSED * self._interval
                ),
                send_ping=lambda: outbox.control(Ping()),
            ) as connection:
                # Inside the connection: its requests are woken when it fails, not when a dead socket has been closed.
                with self._registry.registered(hello, outbox.control, close) as node:
                    proof = master_proof(self._token, hello.nonce, self._incarnation)
                    welcome = Welcome(node.generation, version, self._incarnation, proof, (), self._interval)
                    outbox.control(welcome)
                    self._registry.introduce(node)
                    self._metrics.node_connected(hello.role)
                    log.info("%s registered (capacity %d)", name, hello.capacity)
                    try:
                        await left.wait()
                    finally:
                        if self._registry.is_current(node):
                            self._metrics.forget_node(hello.node_id)
                connection.close(REPLACED, closing[0])
            reason = "replaced"
            log.warning("%s: %s", name, closing[0])
        except ConnectionLost as lost:
            reason = "left" if lost.code == GOING_AWAY else "lost"
            if lost.internal:
                log.error("%s: %s", name, lost.reason, exc_info=lost)
            else:
                log.log(logging.INFO if reason == "left" else logging.WARNING, "%s: %s", name, lost.reason)
            if reason == "lost" and not self._is_registered(hello.node_id):
                self._registry.absent.note(hello.node_id, f"lost {name}: {lost.reason}", trio.current_time())
        finally:
            self._metrics.node_lost(hello.role, reason)

    def _is_registered(self, node_id: str) -> bool:
        return any(node.node_id == node_id for node in self._registry.nodes())

    def _on_message(self, node: Node, message: bytes | str) -> None:
        frame = decode_from_node(message)
        match frame:
            case Ping():
                pass
            case NodeStats():
                node.stats = frame
                node.assigned_tokens = 0
                self._metrics.set_node(node.node_id, node.role, frame)
            case Draining():
                log.info("%s %s drains", node.role, node.node_id)
            case Hello():
                raise ProtocolError("a second hello")
            case _:
                self._route(node, frame)

    def _route(self, node: Node, frame: msgspec.Struct) -> None:
        """A frame about a request that is not this node's any more (older epoch, cancelled) changes nothing."""
        mailbox = node.mailboxes.get((frame.id, frame.epoch))  # type: ignore[attr-defined]
        if mailbox is not None:
            mailbox.deliver(node, frame)
