"""Clients that mean harm, on real sockets: each costs itself, and an ordinary request is answered meanwhile."""

import resource
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import trio

pytestmark = pytest.mark.trio

COMPLETIONS = "/v1/completions"
IDLE = 2000
MIB = 1024 * 1024


@pytest.fixture
def many_files():
    """Both ends of every connection are files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * IDLE + 500
    assert hard == resource.RLIM_INFINITY or hard >= wanted, "this machine allows too few open files for this test"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def serves(server, within=2.0):
    """An ordinary request is answered in time."""
    with trio.fail_after(within):
        reply = await server.client.post(COMPLETIONS, json={"prompt": "a"})
    assert (reply.status_code, reply.json()["choices"][0]["text"]) == (200, "hello")


async def ends(stream):
    """What came until the server closed; one that is not read to its end may be reset."""
    data = b""
    try:
        async for chunk in stream:
            data += chunk
    except trio.BrokenResourceError:
        pass
    return data


async def read_until(stream, mark):
    data = b""
    while mark not in data:
        chunk = await stream.receive_some()
        assert chunk, f"the connection ended after {data!r}"
        data += chunk
    return data


@asynccontextmanager
async def trickling(stream, data, pause=0.02):
    """Sends one byte after the other for as long as the block runs or the server listens."""

    async def send():
        try:
            for byte in data:
                await stream.send_all(bytes([byte]))
                await trio.sleep(pause)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        yield
        nursery.cancel_scope.cancel()


async def test_a_body_that_comes_byte_by_byte_has_a_deadline_for_all_of_it(running, post):
    async with running(body_timeout=0.5) as server:
        request = post(COMPLETIONS, b" " * 100_000)
        head, _, body = request.partition(b"\r\n\r\n")
        began = time.monotonic()
        async with await server.connect(head + b"\r\n\r\n") as stream, trickling(stream, body):
            await serves(server, within=0.4)
            with trio.fail_after(5):
                assert (await read_until(stream, b"body_timeout")).split()[1] == b"408"
        assert 0.4 < time.monotonic() - began < 2.0
        await server.settled(COMPLETIONS, "invalid")


@pytest.mark.parametrize("shape", [b"X: %s", b"Cookie: a=%s\r\nHost: x", b"%s"])
async def test_a_header_of_a_mebibyte_is_refused_at_once(server, shape):
    head = b"GET /livez HTTP/1.1\r\n" + shape % (b"y" * MIB) + b"\r\n\r\n"
    with trio.fail_after(5):
        async with await server.connect() as stream, trio.open_nursery() as nursery:

            async def send():
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(head)

            nursery.start_soon(send)
            data = await ends(stream)
    assert data == b"" or data.split()[1] in (b"400", b"431")
    await serves(server)


async def test_many_small_headers_are_bounded_in_all(server):
    head = b"GET /livez HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 500) for i in range(2000))
    with trio.fail_after(5):
        async with await server.connect() as stream:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(head)
            data = await ends(stream)
    assert data == b"" or data.split()[1] in (b"400", b"431")
    await serves(server)


async def test_two_thousand_idle_connections_and_a_request_beside_them(server, many_files):
    async with AsyncExitStack() as stack:
        limit = trio.CapacityLimiter(100)

        async def open_one(data):
            async with limit:
                await stack.enter_async_context(await server.connect(data))

        async with trio.open_nursery() as nursery:
            for number in range(IDLE):  # silent, in the middle of a head, in the middle of a body
                half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                nursery.start_soon(open_one, [b"", half, half + b"Content-Length: 50\r\n\r\n{"][number % 3])
        for _ in range(20):
            await serves(server)
        began = time.monotonic()
        await serves(server)
        assert time.monotonic() - began < 0.5
    await serves(server)
    with trio.fail_after(10):
        while server.metrics.registry.get_sample_value("pdserve_requests_in_flight", {"endpoint": COMPLETIONS}):
            await trio.sleep(0.01)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_64_mebibytes_is_413(server, post, chunked):
    size = 64 * MIB
    if chunked:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        piece = b"%x\r\n%s\r\n" % (MIB, b"x" * MIB)
    else:
        head, piece = post(COMPLETIONS, b"")[:-5] + b" %d\r\n\r\n" % size, b"x" * MIB
    async with await server.connect(head) as stream:
        async with trio.open_nursery() as nursery:

            async def send():
                try:
                    for _ in range(64):
                        await stream.send_all(piece)
                except trio.BrokenResourceError:
                    pass

            nursery.start_soon(send)
            with trio.fail_after(10):
                assert (await read_until(stream, b"body_too_large")).split()[1] == b"413"
            await serves(server)
            nursery.cancel_scope.cancel()
    await server.settled(COMPLETIONS, "invalid")
    assert not [request for request in server.master.requests if len(request.prompt_ids) > 1]


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100_000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxx",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnothing\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000,
        b"GET /livez HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: !!!\r\nConnection: Upgrade\r\n\r\n",
    ],
)
async def test_garbage_costs_its_connection(server, data):
    async with await server.connect(data) as stream:
        with trio.move_on_after(0.2):
            await ends(stream)
        await serves(server)
    await serves(server)
