"""The only place that knows HTTP statuses: every error as an OpenAI-shaped response."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
from starlette.exceptions import HTTPException

from pdserve.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoWorkersError,
    RequestError,
    ServerBusyError,
    UnknownModelError,
    WorkerFailedError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.telemetry.metrics import Outcome


class UnauthorizedError(RequestError):
    """No valid API key came with the request."""

    code = "invalid_api_key"


class BodyTooLargeError(RequestError):
    """The request body is over the limit."""

    code = "body_too_large"


class BodyTimeoutError(RequestError):
    """The request body did not arrive in time."""

    code = "body_timeout"


@attrs.frozen
class _Kind:
    status: int
    type: str
    outcome: Outcome


_INVALID = "invalid_request_error"
_KINDS: tuple[tuple[type[RequestError], _Kind], ...] = (
    (InvalidRequestError, _Kind(400, _INVALID, "invalid")),
    (UnauthorizedError, _Kind(401, _INVALID, "invalid")),
    (UnknownModelError, _Kind(404, _INVALID, "invalid")),
    (BodyTimeoutError, _Kind(408, _INVALID, "invalid")),
    (BodyTooLargeError, _Kind(413, _INVALID, "invalid")),
    (ServerBusyError, _Kind(429, "ServerBusyError", "busy")),
    (WorkerFailedError, _Kind(502, "WorkerFailedError", "failed")),
    (NoWorkersError, _Kind(503, "ServiceUnavailableError", "unavailable")),
    (DeadlineExceededError, _Kind(504, "DeadlineExceededError", "deadline")),
)
_INTERNAL = _Kind(500, "InternalServerError", "failed")
_UNAVAILABLE_RETRY_AFTER = 2.0
"""Seconds; about what a node needs to come back and register."""


@attrs.frozen
class ErrorReply:
    """An error as its client sees it."""

    status: int
    body: Mapping[str, Any]
    outcome: Outcome
    headers: tuple[tuple[str, str], ...] = ()
    expected: bool = True
    """False: a bug, to be logged with its traceback; the client gets no internals."""


def error_reply(error: Exception) -> ErrorReply:
    """The reply to any exception of a request, a group of them included."""
    if isinstance(error, ExceptionGroup):
        error = _most_specific(error)
    if isinstance(error, HTTPException):
        return _routing_reply(error)
    if not isinstance(error, RequestError):
        body = _body("internal error; the server's log has the details", _INTERNAL.type, None, "internal_error")
        return ErrorReply(_INTERNAL.status, body, _INTERNAL.outcome, expected=False)
    kind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), _INTERNAL)
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, ServerBusyError):
        headers = (("retry-after", _whole_seconds(error.retry_after)),)
    elif isinstance(error, NoWorkersError):
        headers = (("retry-after", _whole_seconds(_UNAVAILABLE_RETRY_AFTER)),)
    elif isinstance(error, UnauthorizedError):
        headers = (("www-authenticate", "Bearer"),)
    return ErrorReply(kind.status, _body(error.message, kind.type, error.param, error.code), kind.outcome, headers)


def choice_error_reply(error: Exception, choice: int) -> ErrorReply:
    """The reply to the failure of one of several choices, named `choices[i]`.

    Whatever the error, the request counts as failed: its client gets some of the choices only.
    """
    reply = error_reply(error)
    where = f"choices[{choice}]"
    told = reply.body["error"]
    body = {"error": {**told, "message": f"{where}: {told['message']}", "param": where}}
    return attrs.evolve(reply, body=body, outcome="failed")


def _routing_reply(error: HTTPException) -> ErrorReply:
    codes = {404: "not_found", 405: "method_not_allowed"}
    body = _body(error.detail, _INVALID, None, codes.get(error.status_code, "http_error"))
    return ErrorReply(error.status_code, body, "invalid", tuple((error.headers or {}).items()))


def _body(message: str, type_: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def _most_specific(group: ExceptionGroup[Exception]) -> Exception:
    """What a group is about: a bug in it comes before the request's own error, as it must not stay unseen."""
    leaves = list(_leaves(group))
    return next((leaf for leaf in leaves if not isinstance(leaf, RequestError | HTTPException)), leaves[0])


def _leaves(group: ExceptionGroup[Exception]) -> list[Exception]:
    found: list[Exception] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, ExceptionGroup) else [error])
    return found


def _whole_seconds(seconds: float) -> str:
    """`Retry-After` takes whole seconds; rounded up, at least one."""
    return str(max(1, math.ceil(seconds)))
