import pytest
import trio

from pdserve.master.service import Readiness

pytestmark = pytest.mark.trio

COMPLETIONS = "/v1/completions"


def parsed(data):
    """Status code, headers and body."""
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), body


async def test_pages(server):
    get = server.client.get
    assert (await get("/livez")).json() == {"alive": True}
    assert (await get("/")).json()["model"] == "sim-bytes"
    models = (await get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["sim-bytes"]
    assert (await get("/v1/models/sim-bytes")).json() == models["data"][0]
    assert (await get("/v1/models/org/other")).json()["error"]["code"] == "model_not_found"
    tree = (await get("/debug/tree")).json()
    assert (tree["name"], "Event" in tree["odd"]) == ("master", True)
    assert (await server.client.head("/livez")).status_code == 200


async def test_readiness_and_its_reasons(server):
    assert (await server.client.get("/readyz")).status_code == 200
    server.master.ready = Readiness(False, ("no decode node",), ({"node": "p1"},))
    reply = await server.client.get("/health")
    assert (reply.status_code, reply.json()["reasons"], reply.json()["nodes"]) == (
        503,
        ["no decode node"],
        [{"node": "p1"}],
    )


async def test_a_draining_server_is_not_ready_and_takes_nothing_new(server):
    server.draining = True
    ready = await server.client.get("/readyz")
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["draining"])
    assert (await server.client.get("/livez")).status_code == 200
    reply = await server.client.post(COMPLETIONS, json={"prompt": "a"})
    assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
    assert not server.master.requests
    await server.settled(COMPLETIONS, "unavailable")


async def test_metrics_count_what_clients_see(server):
    await server.client.post(COMPLETIONS, json={"prompt": "a"})
    await server.client.post(COMPLETIONS, json={"prompt": ""})
    await server.client.post(COMPLETIONS, json={"prompt": "a", "model": "x"})
    await server.settled(COMPLETIONS, "ok")
    await server.settled(COMPLETIONS, "invalid", 2)
    reply = await server.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert 'pdserve_requests_total{endpoint="/v1/completions",outcome="ok"} 1.0' in reply.text
    assert 'pdserve_requests_in_flight{endpoint="/v1/completions"} 0.0' in reply.text
    assert "pdserve_output_tokens_total 5.0" in reply.text
    assert "pdserve_itl_seconds_count 2.0" in reply.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", "/livez/", 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("POST", "/livez", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_routing_errors_look_like_the_others(server, method, path, status, code):
    reply = await server.client.request(method, path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert ("allow" in reply.headers) == (status == 405)
    assert reply.headers["x-request-id"]


async def test_api_keys(running):
    async with running(api_keys=["first", "second"]) as server:
        for headers, status in [
            ({}, 401),
            ({"authorization": "Bearer firs"}, 401),
            ({"authorization": "Basic first"}, 401),
            ({"authorization": "first"}, 401),
            ({"authorization": "Bearer first"}, 200),
            ({"authorization": "bearer second"}, 200),
        ]:
            reply = await server.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            assert reply.status_code == status, headers
            if status == 401:
                assert (reply.json()["error"]["code"], reply.headers["www-authenticate"]) == (
                    "invalid_api_key",
                    "Bearer",
                )
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert (await server.client.get(path)).status_code == 200
        for path in ("/v1/models", "/debug/tree", "/"):
            assert (await server.client.get(path)).status_code == 401
        await server.settled(COMPLETIONS, "invalid", 4)


@pytest.mark.parametrize(("label", "kept"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)])
async def test_the_label_is_echoed_unless_unusable(server, label, kept):
    for reply in (
        await server.client.get("/livez", headers={"x-request-id": label}),
        await server.client.get("/nope", headers={"x-request-id": label}),
        await server.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": label}),
    ):
        echoed = reply.headers["x-request-id"]
        assert (echoed == label) == kept
        assert 0 < len(echoed) <= 128
    assert server.master.requests[0].label == echoed


async def test_a_label_that_is_not_ascii_is_replaced(server):
    reply = await server.client.get("/livez", headers={"x-request-id": b"caf\xe9"})
    assert reply.headers["x-request-id"].isalnum()


async def test_a_body_over_the_limit_is_refused(running, post):
    async with running(max_body_bytes=1000) as server:
        reply = await server.client.post(COMPLETIONS, content=b"x" * 1001)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")

        async def chunks():
            for _ in range(20):
                yield b"y" * 100

        reply = await server.client.post(COMPLETIONS, content=chunks())
        assert reply.status_code == 413
        reply = await server.client.post(COMPLETIONS, content=b'{"prompt": "%s"}' % (b"x" * 900))
        assert reply.status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/nope", "/livez"])
async def test_a_large_body_nobody_wants_neither_hides_the_answer_nor_keeps_the_connection(running, post, path):
    """More than hypercorn's queue of body messages holds, sent in full before the answer is read."""
    async with running(max_body_bytes=1000) as server:
        with trio.fail_after(5):
            status, head, body = parsed(await server.talk(post(path, b"x" * 5_000_000, close=True)))
        assert (status, "application/json" in head) == ({COMPLETIONS: 413, "/nope": 404, "/livez": 405}[path], True)
        assert b'"error"' in body


async def test_a_body_that_never_ends_is_given_up(running, post):
    async with running(body_timeout=0.1) as server:
        with trio.fail_after(5):
            status, _, body = parsed(await server.talk(post(COMPLETIONS, b"x" * 100)[:-50]))
        assert (status, b"body_timeout" in body) == (408, True)
        await server.settled(COMPLETIONS, "invalid")


async def test_a_client_that_leaves_in_its_body_is_no_error(server, post):
    stream = await server.connect(post(COMPLETIONS, b"x" * 100)[:-50])
    await stream.aclose()
    await server.settled(COMPLETIONS, "client_gone")
    assert not server.master.requests


async def test_the_connection_lives_on_after_answers_and_errors(server, post):
    async with await server.connect() as stream:
        for path, body, status in [
            (COMPLETIONS, b'{"prompt":"a"}', b"200"),
            (COMPLETIONS, b"{", b"400"),
            ("/nope", b"abc", b"404"),
            ("/tokenize", b'{"prompt":"a"}', b"200"),
        ]:
            await stream.send_all(post(path, body))
            data = b""
            while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < length(data):
                data += await stream.receive_some()
            assert data.split()[1] == status


def length(data):
    head = data.partition(b"\r\n\r\n")[0].lower()
    return int(head.partition(b"content-length: ")[2].split()[0])


async def test_a_websocket_is_refused(server):
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    async with await server.connect(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + upgrade + key) as stream:
        assert b" 403 " in await stream.receive_some()
