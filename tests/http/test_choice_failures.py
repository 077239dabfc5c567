import json

import pytest
import trio

from pdserve import errors
from pdserve.master.service import ChoiceFailed
from pdserve.wire.messages import Delta

pytestmark = pytest.mark.trio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def request(path):
    if path == "/generate_stream":
        return {"inputs": "a", "parameters": {"n": 3}}
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    return {**prompt, "n": 3, "stream": True, "stream_options": {"include_usage": True}}


def events_of(reply):
    assert reply.status_code == 200
    *events, rest = reply.text.split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data:")) for event in events]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate_stream"])
async def test_the_other_choices_of_a_stream_go_on(server, words, path):
    server.master.script = [
        *words("a", choice=0, finish=None),
        ChoiceFailed(1, errors.WorkerFailedError("broke", param="ids")),
        Delta("r", 0, 1, (98,), "b", finish="stop", choice=0),
        *words("c", choice=2),
    ]
    events = events_of(await server.client.post(path, json=request(path)))
    (position,) = [number for number, event in enumerate(events) if "error" in event]
    assert events[position] == {
        "error": {
            "message": "choices[1]: broke",
            "type": "WorkerFailedError",
            "param": "choices[1]",
            "code": "worker_failed",
        }
    }
    before, after = events[:position], events[position + 1 :]
    assert (len(before), len(after)) == ((2, 3) if path == CHAT else (1, 2))
    if path != "/generate_stream":
        assert all(event["choices"] for event in events if "error" not in event)  # no tail with the usage
        assert [event["choices"][0]["index"] for event in after] == [0, 2, 2] if path == CHAT else [0, 2]
        assert [event["choices"][0]["finish_reason"] for event in after if event["choices"][0]["finish_reason"]] == [
            "stop",
            "stop",
        ]
    await server.settled(path, "failed")
    assert server.counted(path, "ok") == 0


async def test_the_error_comes_right_away_and_does_not_end_the_stream(server, post, words):
    goes_on = trio.Event()
    server.master.script = [
        *words("a", choice=0, finish=None),
        ChoiceFailed(1, errors.WorkerFailedError("broke")),
        goes_on,
        *words("b", choice=2),
        Delta("r", 0, 1, finish="stop", choice=0),
    ]
    body = json.dumps(request(COMPLETIONS)).encode()
    async with await server.connect(post(COMPLETIONS, body, close=True)) as stream:
        data = b""
        while b"choices[1]" not in data:
            data += await stream.receive_some()
        assert not server.master.left.is_set()
        goes_on.set()
        rest = b"".join([chunk async for chunk in stream])
    assert rest.count(b'"finish_reason":"stop"') == 2
    assert b"[DONE]" not in rest
    assert rest.endswith(b"0\r\n\r\n")


async def test_each_failed_choice_is_told(server, words):
    late = errors.DeadlineExceededError("late")
    server.master.script = [*words("a", choice=2), ChoiceFailed(0, late), ChoiceFailed(1, late)]
    events = events_of(await server.client.post(COMPLETIONS, json=request(COMPLETIONS)))
    assert [event["error"]["param"] for event in events[1:]] == ["choices[0]", "choices[1]"]
    assert {event["error"]["code"] for event in events[1:]} == {"deadline_exceeded"}
    await server.settled(COMPLETIONS, "failed")


async def test_a_choice_that_just_stops_beside_a_failed_one_is_told_too(server, words):
    server.master.script = [*words("a", choice=2), ChoiceFailed(0, errors.WorkerFailedError("broke"))]
    events = events_of(await server.client.post(COMPLETIONS, json=request(COMPLETIONS)))
    assert [event["error"]["param"] for event in events[1:]] == ["choices[0]", None]
    await server.settled(COMPLETIONS, "failed")


async def test_a_later_failure_of_the_whole_request_ends_the_stream(server, words):
    server.master.script = [
        *words("a", choice=2),
        ChoiceFailed(0, errors.WorkerFailedError("broke")),
        errors.DeadlineExceededError("late"),
    ]
    events = events_of(await server.client.post(COMPLETIONS, json=request(COMPLETIONS)))
    assert [event["error"]["code"] for event in events[1:]] == ["worker_failed", "deadline_exceeded"]
    await server.settled(COMPLETIONS, "deadline")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate_stream"])
async def test_a_choice_that_fails_before_any_output_fails_the_request(server, path):
    """Its siblings are given up: what they wait for here never comes."""
    server.master.script = [ChoiceFailed(1, errors.WorkerFailedError("broke")), trio.Event()]
    reply = await server.client.post(path, json=request(path))
    assert (reply.status_code, reply.headers["content-type"]) == (502, "application/json")
    assert (reply.json()["error"]["code"], reply.json()["error"]["message"]) == ("worker_failed", "broke")
    assert server.master.left.is_set()
    await server.settled(path, "failed")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "n": 2}),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}),
        (CHAT, {"messages": MESSAGES, "n": 2}),
        ("/generate", {"inputs": "a", "parameters": {"n": 2}}),
    ],
)
async def test_a_failed_choice_fails_a_document_at_once(server, words, path, body, begun):
    output = words("a", choice=0) if begun else []
    server.master.script = [*output, ChoiceFailed(1, errors.WorkerFailedError("broke")), trio.Event()]
    reply = await server.client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["message"]) == (502, "broke")
    assert server.master.left.is_set()
    await server.settled(path, "failed")


async def test_a_client_that_leaves_after_a_failed_choice_gives_the_others_back(server, post, words):
    server.master.script = [
        *words("a", choice=0, finish=None),
        ChoiceFailed(1, errors.WorkerFailedError("broke")),
        trio.Event(),
    ]
    body = json.dumps(request(COMPLETIONS)).encode()
    async with await server.connect(post(COMPLETIONS, body)) as stream:
        data = b""
        while b"choices[1]" not in data:
            data += await stream.receive_some()
    with trio.fail_after(1):
        await server.master.left.wait()
    await server.settled(COMPLETIONS, "client_gone")
