import json
import logging

import pytest
import trio
import trio.testing

from pdserve import errors
from pdserve.wire.messages import Delta

pytestmark = pytest.mark.trio

COMPLETIONS = "/v1/completions"
STREAM = b'{"prompt":"a","stream":true}'
DOCUMENT = b'{"prompt":"a"}'

FAILURES = [
    (errors.InvalidRequestError("no", param="n"), 400, "invalid"),
    (errors.ServerBusyError("full", reason="queue_full", retry_after=2.5), 429, "busy"),
    (errors.WorkerFailedError("broke"), 502, "failed"),
    (errors.NoWorkersError("none"), 503, "unavailable"),
    (errors.DeadlineExceededError("late"), 504, "deadline"),
    (ExceptionGroup("g", [errors.NoWorkersError("none")]), 503, "unavailable"),
]


async def read_until(stream, mark):
    data = b""
    while mark not in data:
        chunk = await stream.receive_some()
        assert chunk, f"the connection ended after {data!r}"
        data += chunk
    return data


@pytest.mark.parametrize("body", [DOCUMENT, STREAM])
@pytest.mark.parametrize(("error", "status", "outcome"), FAILURES)
async def test_an_error_before_the_first_delta_is_a_status(server, body, error, status, outcome):
    server.master.script = [error]
    reply = await server.client.post(COMPLETIONS, content=body)
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json")
    assert reply.json()["error"]["message"]
    if status == 429:
        assert reply.headers["retry-after"] == "3"
    assert server.master.left.is_set()
    await server.settled(COMPLETIONS, outcome)


@pytest.mark.parametrize("body", [DOCUMENT, STREAM])
async def test_a_bug_is_logged_and_not_shown(server, body, caplog):
    server.master.script = [KeyError("secret")]
    reply = await server.client.post(COMPLETIONS, content=body, headers={"x-request-id": "label-7"})
    assert (reply.status_code, "secret" in reply.text) == (500, False)
    assert "label-7" in caplog.text
    assert "secret" in caplog.text


async def test_nothing_is_sent_before_the_first_delta(server, post, words):
    admitted = trio.Event()
    server.master.script = [admitted, *words("hi")]
    stream = await server.connect(post(COMPLETIONS, STREAM))
    await server.master.entered.wait()
    with trio.move_on_after(0.1) as waited:
        await stream.receive_some()
    assert waited.cancelled_caught
    admitted.set()
    assert (await read_until(stream, b"[DONE]")).startswith(b"HTTP/1.1 200")
    await stream.aclose()


@pytest.mark.parametrize(
    ("error", "code"),
    [(errors.WorkerFailedError("broke"), "worker_failed"), (RuntimeError("secret"), "internal_error")],
)
async def test_an_error_in_the_stream_is_its_last_event(server, words, error, code, caplog):
    server.master.script = [*words("hel", finish=None), error]
    reply = await server.client.post(COMPLETIONS, content=STREAM)
    first, last, rest = reply.text.split("\n\n")
    assert (reply.status_code, rest) == (200, "")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "hel"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert "secret" not in reply.text
    assert ("secret" in caplog.text) == (code == "internal_error")
    await server.settled(COMPLETIONS, "failed")


async def test_an_error_in_a_document_is_a_status_though_it_comes_late(server, words):
    server.master.script = [*words("hel", finish=None), errors.DeadlineExceededError("late")]
    assert (await server.client.post(COMPLETIONS, content=DOCUMENT)).status_code == 504


@pytest.mark.parametrize("script", [[], [Delta("r", 0, 0, (1,), "x")]])
async def test_a_generation_that_just_stops_is_never_a_clean_finish(server, script):
    server.master.script = script
    assert (await server.client.post(COMPLETIONS, content=DOCUMENT)).status_code == 502
    reply = await server.client.post(COMPLETIONS, content=STREAM)
    assert "[DONE]" not in reply.text
    assert "worker_failed" in reply.text
    assert reply.status_code == (200 if script else 502)


async def test_an_error_while_the_generation_is_left_ends_the_stream_with_it(server):
    server.master.exit_error = errors.WorkerFailedError("broke")
    reply = await server.client.post(COMPLETIONS, content=STREAM)
    assert "[DONE]" not in reply.text
    assert "worker_failed" in reply.text


@pytest.mark.parametrize("body", [DOCUMENT, STREAM])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_gives_the_generation_back(server, post, words, body, begun):
    server.master.script = [*(words("hel", finish=None) if begun else ()), trio.Event()]
    stream = await server.connect(post(COMPLETIONS, body))
    await server.master.entered.wait()
    if begun and body is STREAM:
        await read_until(stream, b"hel")
    await stream.aclose()
    with trio.fail_after(1):
        await server.master.left.wait()
    await server.settled(COMPLETIONS, "client_gone")


async def test_a_bug_while_a_client_leaves_is_logged(server, post, caplog):
    server.master.script = [trio.Event()]
    server.master.exit_error = KeyError("secret")
    stream = await server.connect(post(COMPLETIONS, STREAM))
    await server.master.entered.wait()
    await stream.aclose()
    await server.settled(COMPLETIONS, "client_gone")
    assert "secret" in caplog.text


async def test_the_other_streams_go_on_when_one_client_leaves(server, post, words):
    admitted = trio.Event()
    server.master.script = [admitted, *words("hel", "lo")]
    stays = await server.connect(post(COMPLETIONS, STREAM))
    await server.master.entered.wait()
    server.master.script = [trio.Event()]
    leaves = await server.connect(post(COMPLETIONS, STREAM))
    while len(server.master.requests) < 2:
        await trio.testing.wait_all_tasks_blocked()
    await leaves.aclose()
    await server.master.left.wait()
    admitted.set()
    assert b"lo" in await read_until(stays, b"[DONE]")
    await stays.aclose()


async def test_connection_close_reaches_the_end_of_file(server, post):
    with trio.fail_after(2):
        data = await server.talk(post(COMPLETIONS, STREAM, close=True))
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_connection_close_reaches_the_end_of_file_after_an_error_too(server, post, words):
    server.master.script = [*words("hel", finish=None), errors.WorkerFailedError("broke")]
    with trio.fail_after(2):
        data = await server.talk(post(COMPLETIONS, STREAM, close=True))
    assert b"worker_failed" in data
    assert data.endswith(b"0\r\n\r\n")


async def test_the_connection_is_used_again_after_a_stream(server, post, words):
    stream = await server.connect()
    for _ in range(3):
        server.master.script = words("hel", "lo")
        await stream.send_all(post(COMPLETIONS, STREAM))
        await read_until(stream, b"0\r\n\r\n")
    await stream.aclose()
    await server.settled(COMPLETIONS, "ok", 3)


async def test_an_idle_connection_closes_when_the_server_stops(server, post):
    stream = await server.connect(post(COMPLETIONS, STREAM))
    await read_until(stream, b"0\r\n\r\n")
    server.stop.set()
    with trio.fail_after(1):
        assert await stream.receive_some() == b""
        await server.stopped.wait()
    await stream.aclose()


async def test_a_request_that_outlives_the_grace_is_cut_and_counted(running, post):
    async with running(graceful=0.1) as server:
        server.master.script = [trio.Event()]
        async with await server.connect(post(COMPLETIONS, STREAM)):
            await server.master.entered.wait()
            server.stop.set()
            await server.stopped.wait()
        assert server.master.left.is_set()
        assert server.counted(COMPLETIONS, "unavailable") + server.counted(COMPLETIONS, "client_gone") == 1


class Flood:
    """Output without end: more than any socket buffer takes."""

    def __iter__(self):
        text = "x" * 100_000
        index = 0
        while True:
            yield Delta("r", 0, index, (1,), text)
            index += 1


@pytest.mark.failure(28)
async def test_a_client_that_does_not_read_loses_its_generation(running, post):
    """The lease goes after the app's timeout though the send is shielded; the connection after the kernel's."""
    async with running(slow_reader_timeout=0.3, user_timeout=0.8) as server:
        server.master.script = Flood()
        stream = await server.connect(post(COMPLETIONS, STREAM), SO_RCVBUF=4096)
        with trio.fail_after(3):
            await server.master.left.wait()
        await server.settled(COMPLETIONS, "client_gone")
        await stream.aclose()


@pytest.mark.failure(28)
async def test_the_kernel_cuts_a_client_that_does_not_read(running, post):
    async with running(slow_reader_timeout=60, user_timeout=0.5) as server:
        server.master.script = Flood()
        stream = await server.connect(post(COMPLETIONS, STREAM), SO_RCVBUF=4096)
        with trio.fail_after(8):
            await server.master.left.wait()
        await server.settled(COMPLETIONS, "client_gone")
        await stream.aclose()


async def test_a_slow_client_that_reads_gets_everything(running, post, words):
    async with running(slow_reader_timeout=1) as server:
        parts = [f"{number:06d}" * 3000 for number in range(60)]
        server.master.script = words(*parts)
        stream = await server.connect(post(COMPLETIONS, STREAM), SO_RCVBUF=65536)
        data = b""
        while b"[DONE]" not in data[-100:]:
            data += await stream.receive_some(200_000)
            await trio.sleep(0.001)
        assert all(part[:60].encode() in data for part in parts)
        await stream.aclose()


async def test_the_access_log_has_neither_query_nor_key(server, caplog):
    caplog.set_level(logging.DEBUG, "pdserve.http.access")  # probes are logged at this level
    await server.client.get("/livez?key=secret", headers={"authorization": "Bearer secret"})
    server.stop.set()
    await server.stopped.wait()
    (record,) = [one for one in caplog.records if one.name == "pdserve.http.access" and " 200 " in one.getMessage()]
    assert '"GET /livez" 200' in record.getMessage()
    assert "secret" not in record.getMessage()
