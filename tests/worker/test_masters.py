"""What `--masters` means, and how one address is dialled: names, literals, TLS. Real sockets, hence a real clock."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trustme
from trio_websocket import wrap_server_stream

from pdserve.errors import ConfigError
from pdserve.worker.dial import dialler
from pdserve.worker.link import Claims
from pdserve.worker.masters import MasterName, resolve_name, sources

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.trio

AUTHORITY = trustme.CA()


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    AUTHORITY.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


@asynccontextmanager
async def listening(cert_for: str = ""):
    """A WebSocket server on 127.0.0.1, with a certificate for that host: its port, and the requests it got."""
    requests = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if cert_for:
        AUTHORITY.issue_cert(cert_for).configure_cert(context)

    async def handle(stream):
        try:
            async with stream, trio.open_nursery() as nursery:
                if cert_for:
                    stream = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
                request = await wrap_server_stream(nursery, stream)
                requests.append((request._event.host, request.path))
                ws = await request.accept()
                await ws.send_message("hello")
                nursery.cancel_scope.cancel()
        except* trio.BrokenResourceError:
            pass  # it did not like the certificate

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listener.socket.getsockname()[1]
            await nursery.start(trio.serve_listeners, handle, [listener])
            yield port, requests
            nursery.cancel_scope.cancel()


async def greeting(dial) -> str:
    async with trio.open_nursery() as nursery:
        ws = await dial(nursery)
        message = await ws.get_message()
        await ws.aclose()
        nursery.cancel_scope.cancel()
    return message


async def test_the_host_header_is_the_name_and_the_path_is_kept():
    async with listening() as (port, requests):
        assert await greeting(dialler(f"ws://master.test:{port}/links?x=1", None)("127.0.0.1")) == "hello"
        assert await greeting(dialler(f"ws://[::1]:{port}", None)("127.0.0.1")) == "hello"
        assert requests == [(f"master.test:{port}", "/links?x=1"), (f"[::1]:{port}", "/")]


async def test_a_certificate_is_checked_against_the_name(ca):
    async with listening("master.test") as (port, requests):
        assert await greeting(dialler(f"wss://master.test:{port}", ca)("127.0.0.1")) == "hello"
        assert requests == [(f"master.test:{port}", "/")]
        for host in ("other.test", "127.0.0.1"):
            with pytest.raises(ExceptionGroup) as caught:
                await greeting(dialler(f"wss://{host}:{port}", ca)("127.0.0.1"))
            assert caught.group_contains(ConnectionError, match=f"TLS: .*not valid for '{host}'")
        with pytest.raises(ExceptionGroup) as caught:
            await greeting(dialler(f"wss://master.test:{port}", None)("127.0.0.1"))
        assert caught.group_contains(ConnectionError, match="TLS: .*certificate verify failed")
        assert len(requests) == 1


async def test_a_certificate_for_an_address(ca):
    async with listening("127.0.0.1") as (port, _):
        ((_, dial),) = sources([f"wss://127.0.0.1:{port}"], ca)
        assert await greeting(dial) == "hello"


async def test_an_authority_that_cannot_be_used_names_its_flag(tmp_path):
    (tmp_path / "ca.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"--link-ca .*ca\.pem"):
        sources(["wss://master.test:1"], tmp_path / "ca.pem")
    sources(["ws://master.test:1"], tmp_path / "ca.pem")


async def test_a_dial_that_is_given_up_leaves_no_socket():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        url = "ws{}://master.test:" + str(listener.socket.getsockname()[1])
        for tls in ("", "s"):
            dial = dialler(url.format(tls), None)("127.0.0.1")
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(dial, nursery)
                    stream = await listener.accept()
                    assert await stream.receive_some(), "it waits for an answer from here on"
                    nursery.cancel_scope.cancel()
                async with stream:
                    while await stream.receive_some():
                        pass


async def test_only_names_are_looked_up():
    asked = []

    async def resolve(host, port):
        asked.append((host, port))
        return ["10.0.0.1"]

    urls = ["ws://10.0.0.9:1", "wss://[fe80::1%25eth0]:2", "ws://[::1]:3", "ws://Masters.svc:4", "ws://localhost:5"]
    *fixed, name, local = sources(urls, None, resolve)
    assert [url for url, _ in fixed] == urls[:3]
    assert isinstance(name, MasterName)
    assert (name.url, await name.resolve()) == ("ws://Masters.svc:4", ["10.0.0.1"])
    await local.resolve()
    assert asked == [("masters.svc", 4), ("localhost", 5)]


async def test_the_system_resolver():
    with trio.fail_after(10):
        addresses = await resolve_name("localhost", 8100)
        assert "127.0.0.1" in addresses
        assert len(addresses) == len(set(addresses))
        with pytest.raises(UnicodeError):
            await resolve_name("a" * 70, 8100)


async def test_a_claim_is_for_one_master_and_ends():
    claims = Claims()
    with claims.held("m", "ws://a"), claims.held("", "ws://old"), claims.held("", "ws://older"):
        claim = claims.on("m")
        assert claim is not None
        assert claim.url == "ws://a"
        assert claims.on("") is None
        assert not claim.ended.is_set()
    assert claims.on("m") is None
    assert claim.ended.is_set()
