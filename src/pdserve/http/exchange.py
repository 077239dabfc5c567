"""One HTTP request and its response, seen from the outermost layer: label, key, body, disconnects, and every error."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from typing import TYPE_CHECKING, Any, cast

import msgspec
import trio

from pdserve.http.errors import BodyTimeoutError, BodyTooLargeError, UnauthorizedError, error_reply

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pdserve.telemetry.metrics import MasterMetrics, Outcome

log = logging.getLogger("pdserve.http")

_LINGER = 2.0
"""Seconds for which the rest of an unread body is taken after an early answer, so that the client sees the answer
instead of a reset."""
_LABEL = re.compile(r"[\x21-\x7e]{1,128}")
Headers = tuple[tuple[str, str], ...]


class ClientGoneError(Exception):
    """The client has left, or stopped reading: there is nobody to answer."""


class Exchange:
    """The request's `receive` and `send` with what every response needs: the label, and no body left unread.

    hypercorn buffers ten body messages; a response that ends while more are on the way would block its connection
    for good (HTTP/1.1) or break it (HTTP/2). So the last message waits, within bounds, for the body's end.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.accepted_at = trio.current_time()
        self.request_headers: dict[bytes, bytes] = dict(scope["headers"])
        self.label = _label(self.request_headers.get(b"x-request-id"))
        self.outcome: Outcome = "ok"
        self.started = False
        """The status line is sent: errors can no longer become a status."""
        self._receive = receive
        self._send = send
        self._body_done = False
        self._disconnected = False

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The exchange that the boundary has put into the scope."""
        return cast("Exchange", scope["pdserve.exchange"])

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._disconnected = True
        elif not message.get("more_body", False):
            self._body_done = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = [*message.get("headers", ()), (b"x-request-id", self.label.encode())]
            await self._send({**message, "headers": headers})
        elif message.get("more_body", False) or self._body_done or self._disconnected:
            await self._send(message)
        else:
            await self._send_last_early(message)

    async def read_body(self, *, max_bytes: int, timeout: float) -> bytes:
        """The whole body. Raises BodyTooLargeError, BodyTimeoutError or ClientGoneError."""
        declared = self.request_headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > max_bytes:
            raise BodyTooLargeError(f"the body has {int(declared)} bytes; at most {max_bytes} are taken")
        chunks: list[bytes] = []
        size = 0
        with trio.move_on_after(timeout):
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > max_bytes:
                    raise BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
                chunks.append(chunk)
                if self._body_done:
                    return b"".join(chunks)
        raise BodyTimeoutError(f"the body did not arrive within {timeout:g} s")

    async def wait_disconnect(self) -> None:
        """Return when the client has left."""
        while not self._disconnected:
            await self.receive()

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """The last of the body. Nothing may be waiting in `receive` (STYLE.md, hypercorn on trio)."""
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def respond(self, status: int, document: Any, headers: Headers = ()) -> None:  # noqa: ANN401 - JSON
        body = to_json(document)
        fixed = (("content-type", "application/json"), ("content-length", str(len(body))))
        await self.start(status, (*fixed, *headers))
        await self.finish(body)

    async def _send_last_early(self, message: Message) -> None:
        await self._send({**message, "more_body": True})
        with trio.move_on_after(_LINGER):
            while not (self._body_done or self._disconnected):
                await self.receive()
        # Closing, too, waits for room in the queue of body messages: keep taking them. This task ends by itself on
        # the disconnect that the close causes, it cancels nothing.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.wait_disconnect)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel()


class Boundary:
    """The outermost ASGI app: every request gets its exchange, its key checked, its outcome counted, and an answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: MasterMetrics,
        api_keys: Sequence[str],
        open_paths: Collection[str],
        counted_paths: Collection[str],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._open_paths = frozenset(open_paths)
        self._counted_paths = frozenset(counted_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        # With "app" in the scope Starlette raises its 404 and 405 instead of answering with a page of its own.
        inner = {**scope, "app": self, "pdserve.exchange": exchange}
        path = scope["path"]
        if path not in self._counted_paths:
            await self._answer(inner, exchange, path)
            return
        self._metrics.request_started(path)
        outcome: Outcome = "unavailable"  # stays when the server is stopped under the request
        try:
            await self._answer(inner, exchange, path)
            outcome = exchange.outcome
        finally:
            self._metrics.request_finished(path, outcome, trio.current_time() - exchange.accepted_at)

    async def _answer(self, scope: Scope, exchange: Exchange, path: str) -> None:
        try:
            if self._keys and path not in self._open_paths:
                self._authorise(exchange)
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGoneError:
            exchange.outcome = "client_gone"
        except Exception as error:
            reply = error_reply(error)
            exchange.outcome = reply.outcome
            if not reply.expected:
                log.exception("request %s to %s failed", exchange.label, path)
            if not exchange.started:
                await exchange.respond(reply.status, reply.body, reply.headers)

    def _authorise(self, exchange: Exchange) -> None:
        """Constant time in the key's contents and length. Raises UnauthorizedError."""
        scheme, _, key = exchange.request_headers.get(b"authorization", b"").partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise UnauthorizedError("a valid API key is needed: Authorization: Bearer <key>")


def to_json(document: Any) -> bytes:  # noqa: ANN401 - JSON
    """UTF-8 JSON; what JSON does not know becomes a string."""
    return msgspec.json.encode(document, enc_hook=str)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _label(value: bytes | None) -> str:
    """The client's `X-Request-Id`, or one made up when it has none, or one that does not belong into logs."""
    text = (value or b"").decode("latin-1")
    return text if _LABEL.fullmatch(text) else secrets.token_hex(16)
