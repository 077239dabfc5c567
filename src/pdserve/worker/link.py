"""One node's link to one Master: dial, handshake, serve, and dial again with jittered back-off. Never gives up."""

from __future__ import annotations

import logging
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, Protocol

import attrs
import trio
from trio_websocket import ConnectionClosed, HandshakeError

from pdserve.errors import FatalError, ProtocolError
from pdserve.nurseries.connection import GOING_AWAY, ConnectionLost, connection_scope
from pdserve.nurseries.forwarder import Outbox
from pdserve.nurseries.groups import leaves
from pdserve.nurseries.heartbeat import Heartbeat, pace
from pdserve.nurseries.shelter import sheltered_nursery
from pdserve.wire.codec import decode_from_master, encode
from pdserve.wire.handshake import REPLACED, signed, verify_master
from pdserve.wire.messages import (
    Cancel,
    Challenge,
    Decode,
    Draining,
    PeerDown,
    PeerUp,
    Ping,
    Prefill,
    Reject,
    Release,
    Renew,
    Reserve,
    Welcome,
)
from pdserve.worker.requests import LinkRequests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_websocket import WebSocketConnection

    from pdserve.transfer.owner import TransferOwner
    from pdserve.wire.messages import Hello, NodeStats
    from pdserve.worker.dial import Dial

log = logging.getLogger("pdserve.link")

_HANDSHAKE_TIMEOUT = 10.0
_BACKOFF_FIRST, _BACKOFF_MOST = 0.1, 5.0
_REPLACED = 10
"""As many failures as it takes for the longest pause."""
_EXPECTED = (ConnectionLost, ConnectionClosed, HandshakeError, ProtocolError, OSError, trio.TooSlowError)
HEARTBEATS_MISSED = 3
"""A peer silent for so many intervals is lost."""


class Role(Protocol):
    """What a link needs of the node's role; every call is synchronous and in the order of arrival."""

    draining: bool

    def accept_prefill(self, frame: Prefill, link: LinkRequests) -> None: ...

    def accept_reserve(self, frame: Reserve, link: LinkRequests) -> None: ...

    def accept_decode(self, frame: Decode, link: LinkRequests) -> None: ...

    def accept_cancel(self, frame: Cancel, link: LinkRequests) -> None: ...

    def stats(self) -> NodeStats: ...


@attrs.frozen(eq=False)
class Claim:
    """One link's claim to serve one Master."""

    url: str
    ended: trio.Event = attrs.field(factory=trio.Event)


class Claims:
    """Which link of this node serves which Master, by incarnation: one for each, or they would replace each other."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}

    def on(self, master: str) -> Claim | None:
        return self._claims.get(master)

    @contextmanager
    def held(self, master: str, url: str) -> Iterator[None]:
        """Claim a Master that nobody has claimed, for as long as the context lasts. An older one names itself ""."""
        if not master:
            yield
            return
        claim = self._claims[master] = Claim(url)
        try:
            yield
        finally:
            del self._claims[master]
            claim.ended.set()


class MasterLink:
    """Keeps one Master served. A dead link ends that link's requests only.

    Where another link of this node serves the same Master, this one stands by: it takes over when that one ends, and
    looks every `stand_by` seconds whether it is still the same Master.
    """

    def __init__(
        self,
        url: str,
        dial: Dial,
        hello: Hello,
        role: Role,
        owner: TransferOwner,
        claims: Claims,
        *,
        token: str,
        heartbeat_interval: float,
        stand_by: float,
    ) -> None:
        self.url = url
        self.state = "connecting"
        """For status pages: `connecting`, `registered`, `closing`, `the same Master as …`, or why it ended."""
        self.redundant = False
        """Another link serves this Master."""
        self._hello = hello
        self._role = role
        self._owner = owner
        self._token = token
        self._interval = heartbeat_interval
        self._claims = claims
        self._stand_by = stand_by
        self._dial = dial
        self._requests: LinkRequests | None = None
        self._failures = 0  # since the last registration

    @property
    def registered(self) -> bool:
        """Whether this link serves; over as soon as it fails, not when a dead socket has been closed."""
        return self._requests is not None

    async def run(self) -> NoReturn:
        """Serve the Master for as long as this task lives. Only a FatalError or a cancellation gets out."""
        while True:
            try:
                other = await self._once()
            except Exception as error:
                # A nursery is strict: whatever ended the connection comes in a group.
                causes = list(leaves(error))
                for cause in causes:
                    if isinstance(cause, FatalError):
                        raise cause from error
                self._failures += 1
                self.redundant = False
                if isinstance(causes[0], ConnectionLost) and causes[0].code == REPLACED:
                    self._failures = _REPLACED  # whoever else has this id would be replaced in turn, and so on
                self._note(causes[0], error)
            else:
                self._failures = 0
                await self._wait_for(other)
            delay = min(_BACKOFF_FIRST * 2 ** min(self._failures, 10), _BACKOFF_MOST)
            await trio.sleep(delay * random.uniform(0.5, 1.0))  # jitter, not cryptography

    async def _wait_for(self, other: Claim) -> None:
        self.redundant = True
        state = f"the same Master as {other.url}"
        if self.state != state:
            log.info("link to Master %s: %s", self.url, state)
        self.state = state
        with trio.move_on_after(self._stand_by):
            await other.ended.wait()

    def _note(self, cause: BaseException, error: Exception) -> None:
        """Log why the link is down: once per reason, with the traceback where it is a bug of this side."""
        reason = str(cause) or type(cause).__name__
        bug = not isinstance(cause, _EXPECTED) or (isinstance(cause, ConnectionLost) and cause.internal)
        if bug:
            log.error("link to Master %s: %s", self.url, reason, exc_info=error)
        elif isinstance(cause, ConnectionLost) and cause.code == REPLACED:
            who = self._hello.node_id
            log.warning("link to Master %s: another process has registered as %s: --node-id must differ", self.url, who)
        elif self.state != reason:
            left = isinstance(cause, ConnectionLost) and cause.code == GOING_AWAY
            log.log(logging.INFO if left else logging.WARNING, "link to Master %s: %s", self.url, reason)
        self.state = reason

    def announce_drain(self) -> None:
        """Tell the Master, if there is one, that nothing new is taken."""
        if self._requests is not None:
            self._requests.send(Draining())
            self._requests.send(self._role.stats())

    def report(self) -> None:
        """Send the node's load soon; reports that still wait are replaced by the newest."""
        if self._requests is not None:
            self._requests.report(self._role.stats)

    def snapshot(self) -> dict[str, object]:
        requests = self._requests.snapshot() if self._requests is not None else []
        return {"master": self.url, "state": self.state, "requests": requests}

    async def _once(self) -> Claim:
        """One connection, to its end. Returns only where another link serves the Master: that link's claim."""
        async with sheltered_nursery() as nursery:
            with trio.fail_after(_HANDSHAKE_TIMEOUT):
                ws = await self._dial(nursery)
            try:
                with trio.fail_after(_HANDSHAKE_TIMEOUT):
                    challenge = decode_from_master(await ws.get_message())
                if not isinstance(challenge, Challenge):
                    raise ProtocolError(f"expected a challenge, got {type(challenge).__name__}")
                other = self._claims.on(challenge.master)
                if other is None:
                    with self._claims.held(challenge.master, self.url):  # before any wait: links dial at the same time
                        with trio.fail_after(_HANDSHAKE_TIMEOUT):
                            welcome = await self._shake_hands(ws, challenge)
                        await self._serve(ws, pace(self._interval, welcome.heartbeat_interval))
            finally:
                with trio.move_on_after(1.0, shield=True):
                    await ws.aclose()
        assert other is not None, "a link that serves ends with an exception"
        return other

    async def _shake_hands(self, ws: WebSocketConnection, challenge: Challenge) -> Welcome:
        hello = signed(self._hello, self._token, challenge.nonce)
        await ws.send_message(encode(hello))
        answer = decode_from_master(await ws.get_message())
        if isinstance(answer, Reject):
            raise ProtocolError(f"refused: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"expected a welcome, got {type(answer).__name__}")
        if not verify_master(self._token, hello.nonce, answer.master, answer.proof):
            raise ProtocolError("the Master could not prove the cluster token")
        if challenge.master not in ("", answer.master):
            raise ProtocolError("the Master gave two incarnations")
        return answer

    async def _serve(self, ws: WebSocketConnection, ping_interval: float) -> None:
        outbox = Outbox(encode=encode, control_limit=8192)
        try:
            async with connection_scope(
                ws,
                name=f"link {self.url}",
                on_message=self._on_message,
                outbox=outbox,
                heartbeat=Heartbeat(ping_interval, HEARTBEATS_MISSED * self._interval),
                send_ping=lambda: outbox.control(self._role.stats()),
            ) as connection:
                with self._registration(LinkRequests(connection, outbox)):
                    outbox.control(self._role.stats())
                    await trio.sleep_forever()
        finally:
            self._owner.link_lost(self)

    @contextmanager
    def _registration(self, requests: LinkRequests) -> Iterator[None]:
        self._requests = requests
        self._failures = 0
        self.state = "registered"
        self.redundant = False
        log.info("registered with Master %s", self.url)
        try:
            yield
        finally:
            self._requests = None
            self.state = "closing"

    def _on_message(self, message: bytes | str) -> None:
        requests = self._requests
        if requests is None:
            return  # it was read while the link failed
        frame = decode_from_master(message)
        match frame:
            case Ping():
                pass
            case Prefill():
                self._role.accept_prefill(frame, requests)
            case Reserve():
                self._role.accept_reserve(frame, requests)
            case Decode():
                self._role.accept_decode(frame, requests)
            case Cancel():
                self._role.accept_cancel(frame, requests)
            case Release() | Renew():
                for request in requests.find(frame.id, frame.epoch):
                    if request.hold is not None:
                        request.hold.renew() if isinstance(frame, Renew) else request.hold.end("released")
            case PeerUp():
                self._owner.peer_up(self, frame.node_id, frame.transfer)
            case PeerDown():
                self._owner.peer_down(self, frame.node_id, frame.incarnation)
            case _:
                raise ProtocolError(f"unexpected {type(frame).__name__} frame")
