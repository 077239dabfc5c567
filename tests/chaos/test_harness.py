"""The chaos tests' own parts: what they would not let pass, and that they do to a process what they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter

import pytest

from chaos.client import Answer, ask
from chaos.sockets import connections, shut_down
from chaos.storm import KINDS, ROLES, SIGNALS, plan
from chaos.verdict import Violation, judge

IDS = [[65, 66, 67]]
THREE = [[65, 66], [67, 68], [69, 70]]
FAILED = {"error": {"message": "a node was lost", "type": "WorkerFailedError", "param": None, "code": "worker_failed"}}


def delta(start: int, *ids: int, index: int = 0, finish: str | None = None) -> dict:
    choice = {"index": index, "text": "", "token_ids": list(ids), "start_index": start, "finish_reason": finish}
    return {"choices": [choice]}


def failed_choice(index: int) -> dict:
    return {"error": {**FAILED["error"], "param": f"choices[{index}]"}}


def stream(*events: dict, done: bool = False, cut: str = "") -> Answer:
    answer = Answer(status=200, complete=not cut, broken=cut)
    answer.add(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))
    answer.add(b"data: [DONE]\n\n" * done)
    return answer


def refused(status: int, body: dict) -> Answer:
    answer = Answer(status=status, complete=True)
    answer.add(json.dumps(body).encode())
    return answer


WHOLE = (delta(0, 65), delta(1, 66, 67, finish="length"))


@pytest.mark.parametrize(
    ("answer", "expected", "more", "end"),
    [
        (stream(*WHOLE, done=True), IDS, {}, "complete"),
        (stream(delta(0, 65), FAILED), IDS, {}, "error in the stream"),
        (refused(429, FAILED), IDS, {}, "429"),
        (refused(502, FAILED), IDS, {}, "502"),
        (stream(delta(0, 65), cut="EOF"), IDS, {"may_break": True}, "broken with its Master"),
        (Answer(broken="not connected"), IDS, {"may_break": True}, "broken with its Master"),
        (stream(delta(0, 65)), IDS, {"left": True}, "left"),
        (Answer(), IDS, {"left": True}, "left"),
        (
            stream(*(delta(0, *ids, index=i, finish="length") for i, ids in enumerate(THREE)), done=True),
            THREE,
            {},
            "complete",
        ),
        (
            stream(
                delta(0, 65, 66, finish="length"),
                failed_choice(1),
                delta(0, 69, 70, index=2, finish="length"),
            ),
            THREE,
            {},
            "error of a choice",
        ),
        (stream(delta(0, 65, 66, finish="length"), failed_choice(1), FAILED), THREE, {}, "error in the stream"),
    ],
)
def test_ends_that_are_allowed(answer, expected, more, end):
    assert judge(answer, expected, **{"left": False, "may_break": False, **more}) == end


@pytest.mark.parametrize(
    ("answer", "expected", "what"),
    [
        (stream(*WHOLE), IDS, "without an error"),
        (stream(delta(0, 65), done=True), IDS, "has not finished"),
        (stream(delta(0, 65)), IDS, "without an error"),
        (stream(delta(0, 65), FAILED, FAILED), IDS, "more than one error"),
        (stream(FAILED, delta(0, 65)), IDS, "not at the end"),
        (stream(delta(0, 65), FAILED, done=True), IDS, "DONE. after an error"),
        (stream(*WHOLE, FAILED), IDS, "every choice has ended"),
        (stream(delta(0, 65), delta(2, 67)), IDS, "a gap"),
        (stream(delta(0, 65), delta(0, 65)), IDS, "a gap"),
        (stream(delta(0, 66)), IDS, "wrong tokens"),
        (stream(delta(0, 65, finish="length"), done=True), IDS, "finished after 1"),
        (stream(delta(0, 65, 66, 67, finish="stop"), done=True), IDS, "another reason"),
        (stream(*WHOLE, delta(3, 68)), IDS, "after its end"),
        (stream(delta(0, 65), cut="EOF"), IDS, "though its Master lived"),
        (Answer(broken="not connected"), IDS, "though its Master lived"),
        (Answer(status=200), IDS, "cut off"),
        (refused(500, FAILED), IDS, "not a status"),
        (refused(400, FAILED), IDS, "not a status"),
        (refused(502, {}), IDS, "says nothing"),
        (stream(failed_choice(1), failed_choice(1)), THREE, "two errors"),
        (stream(delta(0, 65, 66, finish="length"), failed_choice(1)), THREE, "just stops"),
        (stream(delta(0, 65, 66, finish="length"), failed_choice(0)), THREE, "finished and failed"),
    ],
)
def test_what_no_client_may_see(answer, expected, what):
    with pytest.raises(Violation, match=what):
        judge(answer, expected, left=False, may_break=False)


def test_the_plan_has_every_kind_on_every_role_once_a_round_and_spares_a_process_of_each_role():
    events = [event for events in plan("5", 10, 2.5) for event in events]
    assert events == [event for events in plan("5", 10, 2.5) for event in events]
    assert events != [event for events in plan("6", 10, 2.5) for event in events]
    assert Counter((event.kind, event.role) for event in events) == {
        (kind, role): 10 for kind in KINDS for role in ROLES
    }
    late = [event for events in plan("5", 10, 2.5)[3:] for event in events if event.kind in SIGNALS]
    assert all(len({event.which for event in late if event.role == role}) == 1 for role in ROLES)


def test_a_connection_of_another_process_is_found_and_shut_down():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); print(s.recv(1) or 'closed')"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            with server.accept()[0] as accepted:
                (connection,) = [one for one in connections(process.pid) if one.remote == port]
                pidfd = os.pidfd_open(process.pid)
                shut_down(pidfd, connection.fd)
                os.close(pidfd)
                assert process.communicate(timeout=10)[0] == "closed\n"
                assert accepted.recv(1) == b""


@pytest.mark.trio
async def test_a_server_that_is_not_there_is_a_broken_connection():
    answer = Answer()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    await ask(port, {}, answer)
    assert answer.broken.startswith("not connected")
