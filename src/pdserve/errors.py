"""The exception tree. Only `http/errors.py` knows HTTP statuses; everyone else raises and catches these."""

from __future__ import annotations


class PdserveError(Exception):
    """Base of every error that pdserve raises on purpose."""


class ConfigError(PdserveError):
    """A flag, environment variable or file has an unusable value; the message names it."""


class MissingDependencyError(PdserveError):
    """The model, torch or nixl is not installed; the message gives the one command that installs it."""


class FatalError(PdserveError):
    """The process cannot go on (hung engine, dead NIXL owner): it exits non-zero and its parent restarts it."""


class ProtocolError(PdserveError):
    """A peer broke the wire protocol; its connection is closed, nothing else is affected."""


class TransferError(PdserveError):
    """A KV transfer failed, or its hold was stale."""


class PeerDisconnectedError(TransferError):
    """The other agent of a KV transfer is gone: the transfer is terminal, nothing more can land."""


class RequestError(PdserveError):
    """Base of the errors that end one request and are told to its client."""

    code = "error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    """The request itself is wrong; `param` names the offending parameter."""

    code = "invalid_request"


class UnknownModelError(RequestError):
    """No such model is served here."""

    code = "model_not_found"


class ServerBusyError(RequestError):
    """Decode is full, admission timed out, or the prefill queue is full. Never counts as a failure of a node.

    `retry_after` is in seconds, from measured waits.
    """

    code = "server_busy"

    def __init__(self, message: str, *, reason: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class WorkerFailedError(RequestError):
    """A worker or a KV transfer failed while it served this request."""

    code = "worker_failed"


class NoWorkersError(RequestError):
    """No Prefill or no Decode node is registered, or the service drains."""

    code = "unavailable"


class DeadlineExceededError(RequestError):
    """The request's total deadline has passed."""

    code = "deadline_exceeded"
