import contextlib
import gc
import ssl
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
import trio
import trio.testing
import trustme

from pdserve.errors import ConfigError
from pdserve.telemetry.listener import open_listener
from pdserve.telemetry.serving import _Server, serve_asgi

pytestmark = pytest.mark.trio


class App:
    """Answers at once, except for paths that say otherwise."""

    def __init__(self):
        self.entered = trio.Event()
        self.go_on = trio.Event()
        self.cancelled = trio.Event()
        self.stopped = trio.Event()

    async def __call__(self, scope, receive, send):
        assert scope["type"] == "http"
        self.entered.set()
        if scope["path"] == "/whole":
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.disconnect":
                return
        if scope["path"] == "/boom":
            raise RuntimeError("boom")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] in ("/slow", "/whole"):
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            try:
                await self.go_on.wait()
            except trio.Cancelled:
                self.cancelled.set()
                raise
        if scope["path"] == "/flood":
            while True:
                await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await send({"type": "http.response.body", "body": scope["http_version"].encode(), "more_body": False})


@asynccontextmanager
async def serving(graceful=1.0, **options):
    app, stop = App(), trio.Event()
    listener = open_listener("127.0.0.1", 0, user_timeout=30)
    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:

            async def serve(task_status):
                await serve_asgi(app, [listener], stop=stop, graceful=graceful, task_status=task_status, **options)
                app.stopped.set()

            (url,) = await nursery.start(serve)
            yield app, url, stop
            stop.set()


async def dial(url):
    return await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))


async def connect(url, path):
    stream = await dial(url)
    await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return stream


async def rest(stream):
    return b"".join([chunk async for chunk in stream])


async def test_it_serves_until_it_is_stopped():
    async with serving() as (_, url, stop), httpx.AsyncClient(base_url=url) as client:
        reply = await client.get("/")
        assert (reply.text, "server" in reply.headers) == ("1.1", False)
        stop.set()
    with pytest.raises(OSError, match=r"."):
        await dial(url)


async def test_a_response_in_flight_is_finished_after_stop():
    async with serving(graceful=5) as (app, url, stop), await connect(url, "/slow") as stream:
        await app.entered.wait()
        stop.set()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(OSError, match=r"."):
            await dial(url)
        app.go_on.set()
        assert (await rest(stream)).endswith(b"0\r\n\r\n")


POST = b"POST /whole HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


async def test_a_request_that_is_half_sent_at_the_stop_gets_a_short_grace(caplog):
    async with serving(graceful=60, unsent=0.2) as (app, url, stop), await dial(url) as half, await dial(url) as late:
        await half.send_all(POST + b"12")
        await app.entered.wait()
        await late.send_all(POST + b"12")
        await trio.testing.wait_all_tasks_blocked()
        stop.set()
        await late.send_all(b"34")
        assert await rest(half) == b""
        assert not app.stopped.is_set()
        app.go_on.set()
        assert (await rest(late)).endswith(b"0\r\n\r\n")
        await app.stopped.wait()
    assert not caplog.records


async def test_a_handshake_that_does_not_come_gets_a_short_grace(tmp_path, caplog):
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    path = str(tmp_path / "both.pem")
    async with serving(graceful=60, unsent=0.2, certfile=path, keyfile=path) as (app, url, stop), await dial(url) as it:
        await trio.testing.wait_all_tasks_blocked()
        stop.set()
        with trio.fail_after(2):
            assert await rest(it) == b""
            await app.stopped.wait()
    assert not caplog.records


async def test_http2_requests_that_are_answered_keep_their_time_beside_one_that_is_half_sent():
    async with serving(graceful=60, unsent=0.2) as (app, url, stop), await dial(url) as stream:
        client = h2.connection.H2Connection(h2.config.H2Configuration())
        client.initiate_connection()
        for number in (1, 3):
            head = [(":method", "POST"), (":path", "/whole"), (":scheme", "http"), (":authority", "x")]
            client.send_headers(number, head, end_stream=number == 1)
        await stream.send_all(client.data_to_send())
        await app.entered.wait()
        await trio.testing.wait_all_tasks_blocked()
        stop.set()
        await trio.sleep(0.4)
        app.go_on.set()
        ended = False
        while not ended:
            events = client.receive_data(await stream.receive_some())
            ended = any(isinstance(event, h2.events.StreamEnded) and event.stream_id == 1 for event in events)
        await app.stopped.wait()


async def test_a_response_that_outlives_the_grace_is_aborted():
    async with serving(graceful=0.1) as (app, url, stop), await connect(url, "/slow") as stream:
        await app.entered.wait()
        stop.set()
        with trio.fail_after(2):
            data = await rest(stream)
        assert not data.endswith(b"0\r\n\r\n")
        await app.cancelled.wait()


async def test_a_client_that_does_not_read_cannot_hold_up_the_stop():
    """hypercorn shields its sends without limit: only closing the socket ends them."""
    async with serving(graceful=0.1) as (app, url, stop), await connect(url, "/flood"):
        await app.entered.wait()
        await trio.sleep(0.2)  # long enough for every buffer to be full
        stop.set()
        with trio.fail_after(2):
            await app.stopped.wait()


async def test_cancelling_the_server_ends_it_at_once():
    listener = open_listener("127.0.0.1", 0, user_timeout=30)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            app = App()

            async def serve(task_status):
                await serve_asgi(app, [listener], stop=trio.Event(), graceful=30, task_status=task_status)

            (url,) = await nursery.start(serve)
            async with await connect(url, "/flood"):
                await app.entered.wait()
                await trio.sleep(0.2)
                nursery.cancel_scope.cancel()


async def test_an_app_that_fails_is_a_500_and_logged(caplog):
    async with serving() as (_, url, _), httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/boom")).status_code == 500
        assert (await client.get("/")).status_code == 200
    assert "boom" in caplog.text


async def test_bytes_that_are_no_http_are_answered_with_400():
    async with serving() as (_, url, _), await dial(url) as stream:
        await stream.send_all(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 400 " in await rest(stream)


async def test_headers_are_bounded():
    async with serving(max_header_bytes=2000) as (_, url, _), httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/", headers={"x": "y" * 1000})).status_code == 200
        async with await dial(url) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nX: " + b"y" * 5000)
            assert b" 431 " in await rest(stream)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b""])
async def test_a_connection_that_is_over_is_gone_without_the_collector(said):
    def servers():
        return [one for one in gc.get_objects() if type(one) is _Server]

    async with serving() as (_, url, _):
        gc.collect()
        others = servers()  # of tests before
        gc.disable()
        try:
            async with await dial(url) as stream:
                await stream.send_all(said)
                await stream.send_eof()
                await rest(stream)
            while len(servers()) > len(others):
                await trio.sleep(0.1)  # within the deadline of `serving`
        finally:
            gc.enable()


async def test_a_client_that_is_slow_with_its_headers_is_cut():
    async with serving(keep_alive=0.1) as (_, url, _), await dial(url) as stream:
        await stream.send_all(b"GET / HTTP/1.1\r\n")
        with trio.fail_after(2):
            assert await rest(stream) == b""


async def test_a_connection_that_fails_takes_no_other_with_it(caplog):
    """hypercorn 0.18 raises KeyError for HTTP/2 data that comes after the response has ended."""
    async with serving(graceful=5) as (app, url, _), await connect(url, "/slow") as other:
        await app.entered.wait()
        async with await dial(url) as stream:
            client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
            client.initiate_connection()
            head = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
            client.send_headers(1, head)
            await stream.send_all(client.data_to_send())
            ended = False
            while not ended:
                for event in client.receive_data(await stream.receive_some()):
                    ended = ended or isinstance(event, h2.events.StreamEnded)
            client.send_data(1, b"late")
            await stream.send_all(client.data_to_send())
            await rest(stream)
        assert "an HTTP connection failed" in caplog.text
        app.go_on.set()
        assert b"1.1" in await other.receive_some()
        async with httpx.AsyncClient(base_url=url) as fresh:
            assert (await fresh.get("/")).status_code == 200


async def test_tls_speaks_both_versions(tmp_path):
    authority = trustme.CA()
    cert = authority.issue_cert("127.0.0.1")
    cert.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    path = str(tmp_path / "both.pem")
    for version, protocol in (("1.1", "http/1.1"), ("2", "h2")):
        async with serving(certfile=path, keyfile=path) as (_, url, _):
            assert url.startswith("https://127.0.0.1:")
            trust = ssl.create_default_context()
            authority.configure_trust(trust)
            trust.set_alpn_protocols([protocol])
            if protocol == "h2":
                raw = await dial(url)
                stream = trio.SSLStream(raw, trust, server_hostname="127.0.0.1", https_compatible=True)
                await stream.do_handshake()
                assert stream.selected_alpn_protocol() == "h2"
                await stream.aclose()
            else:
                async with httpx.AsyncClient(base_url=url, verify=trust) as client:
                    assert (await client.get("/")).text == version


async def test_a_bad_certificate_is_a_config_error(tmp_path):
    (tmp_path / "bad.pem").write_text("nonsense")
    for path in (str(tmp_path / "bad.pem"), str(tmp_path / "missing.pem")):
        listener = open_listener("127.0.0.1", 0, user_timeout=None)
        with pytest.raises(ConfigError, match="pem"):
            await serve_asgi(App(), [listener], stop=trio.Event(), graceful=0, certfile=path, keyfile=path)
        assert listener.fileno() == -1


async def test_ipv6_urls_have_brackets():
    try:
        listener = open_listener("::1", 0, user_timeout=None)
    except ConfigError:
        pytest.skip("no IPv6 here")
    stop = trio.Event()
    stop.set()
    async with trio.open_nursery() as nursery:

        async def serve(task_status):
            await serve_asgi(App(), [listener], stop=stop, graceful=0, task_status=task_status)

        (url,) = await nursery.start(serve)
    assert url.startswith("http://[::1]:")


async def test_headers_that_come_byte_by_byte_have_a_deadline_for_all_of_them():
    async with serving(keep_alive=0.5) as (_, url, _), await dial(url) as stream, trio.open_nursery() as nursery:

        async def trickle():
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                for byte in b"GET / HTTP/1.1\r\nX: " + b"y" * 10_000:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(0.02)

        nursery.start_soon(trickle)
        async with httpx.AsyncClient(base_url=url) as other:
            assert (await other.get("/")).status_code == 200
        with trio.fail_after(3), contextlib.suppress(trio.BrokenResourceError):
            assert await rest(stream) == b""
        nursery.cancel_scope.cancel()
