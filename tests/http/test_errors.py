import pytest
from starlette.exceptions import HTTPException

from pdserve import errors
from pdserve.http.errors import BodyTimeoutError, BodyTooLargeError, UnauthorizedError, error_reply


@pytest.mark.parametrize(
    ("error", "status", "type_", "outcome"),
    [
        (errors.InvalidRequestError("m", param="p"), 400, "invalid_request_error", "invalid"),
        (UnauthorizedError("m"), 401, "invalid_request_error", "invalid"),
        (errors.UnknownModelError("m"), 404, "invalid_request_error", "invalid"),
        (BodyTimeoutError("m"), 408, "invalid_request_error", "invalid"),
        (BodyTooLargeError("m"), 413, "invalid_request_error", "invalid"),
        (errors.ServerBusyError("m", reason="timeout"), 429, "ServerBusyError", "busy"),
        (errors.WorkerFailedError("m"), 502, "WorkerFailedError", "failed"),
        (errors.NoWorkersError("m"), 503, "ServiceUnavailableError", "unavailable"),
        (errors.DeadlineExceededError("m"), 504, "DeadlineExceededError", "deadline"),
    ],
)
def test_every_request_error_has_its_status(error, status, type_, outcome):
    reply = error_reply(error)
    assert (reply.status, reply.outcome, reply.expected) == (status, outcome, True)
    assert reply.body == {"error": {"message": "m", "type": type_, "param": error.param, "code": error.code}}


def test_an_unexpected_error_shows_nothing_of_itself():
    reply = error_reply(KeyError("secret"))
    assert (reply.status, reply.expected) == (500, False)
    assert "secret" not in str(reply.body)


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (1.0, "1"), (1.2, "2"), (30, "30")])
def test_retry_after_is_whole_seconds_rounded_up(seconds, header):
    reply = error_reply(errors.ServerBusyError("m", reason="queue_full", retry_after=seconds))
    assert dict(reply.headers)["retry-after"] == header


def test_unavailable_says_when_to_retry_and_unauthorised_how():
    assert "retry-after" in dict(error_reply(errors.NoWorkersError("m")).headers)
    assert dict(error_reply(UnauthorizedError("m")).headers)["www-authenticate"] == "Bearer"


def test_a_group_is_its_request_error_unless_a_bug_hides_in_it():
    busy = errors.ServerBusyError("m", reason="timeout")
    assert error_reply(ExceptionGroup("g", [ExceptionGroup("h", [busy])])).status == 429
    assert error_reply(ExceptionGroup("g", [busy, ValueError("bug")])).status == 500


def test_routing_errors_keep_their_headers():
    reply = error_reply(HTTPException(405, headers={"Allow": "GET"}))
    assert (reply.status, dict(reply.headers), reply.body["error"]["code"]) == (
        405,
        {"Allow": "GET"},
        "method_not_allowed",
    )


def test_a_request_error_without_a_status_is_an_internal_one():
    assert error_reply(errors.RequestError("m")).status == 500
