"""Peers that mean harm at the ports of a running service: each costs its own connection, and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from pdserve.engine.sim import expected_tokens
from pdserve.wire.messages import SamplingParams

pytestmark = pytest.mark.e2e

PROMPT = list(range(40, 90))
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
TOKEN = "of the cluster"
INTERVAL = 0.5


def expected(max_tokens: int) -> list[int]:
    return expected_tokens(PROMPT, SamplingParams(max_tokens=max_tokens, temperature=0.0))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, make_sim):
    """Has a cluster token."""
    with make_sim(tmp_path_factory.mktemp("guarded") / "sim.log", "--cluster-token", TOKEN) as service:
        yield service
        service.wait_quiet()


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def frame(opcode: int, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """A masked WebSocket frame that says it has `length` bytes."""
    size = len(payload) if length is None else length
    head = bytes([0x80 | opcode, 0x80 | size]) if size < 126 else bytes([0x80 | opcode, 0xFF]) + struct.pack("!Q", size)
    return head + b"\x00" * 4 + payload


def send(sock: socket.socket, said: bytes) -> None:
    """All of it, or as much as the other side takes before it closes."""
    with contextlib.suppress(ConnectionError):
        sock.sendall(said)


def read_to_end(sock: socket.socket, timeout: float) -> bytes | None:
    """What came until the other side closed; None where it did not."""
    data, deadline = b"", time.monotonic() + timeout
    with contextlib.suppress(ConnectionError):
        while True:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                chunk = sock.recv(65536)
            except TimeoutError:
                return None
            if not chunk:
                break
            data += chunk
    return data


@contextmanager
def undisturbed(service):
    """A stream that runs while the block does is complete, and the same nodes are registered afterwards."""
    before = {(node["node"], node["generation"]) for node in service.nodes()}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(service.stream, PROMPT, max_tokens=80)
        yield
        stream = running.result(30)
    assert (stream.ids, stream.done, stream.errors) == (expected(80), True, [])
    assert {(node["node"], node["generation"]) for node in service.nodes()} == before
    assert service.stream(PROMPT).ids == expected(16)


@pytest.mark.failure(30)
@pytest.mark.parametrize(
    "said",
    [
        b"\x00" * 200_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 2**20 + b"\r\n\r\n",
        os.urandom(50_000),
    ],
    ids=["zeros", "no upgrade", "mebibyte header", "random"],
)
def test_garbage_on_the_node_port_closes_that_connection_and_nothing_else(guarded, said):
    with undisturbed(guarded), dial(guarded.link_port) as sock:
        send(sock, said)
        assert read_to_end(sock, 5) is not None, "it was not closed"


@pytest.mark.failure(30)
@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 1000,
        frame(2, b"\xc1garbage"),
        frame(2, b"\x81\xa4type\xa4ping"),
        frame(1, b"text"),
        frame(2, b"x" * (17 * 2**20)),
        frame(9) * 10_000 + frame(2),
    ],
    ids=["no frame", "no message", "no hello", "text", "17 MiB", "many pings"],
)
def test_garbage_on_an_open_link_closes_it_and_nothing_else(guarded, said):
    with undisturbed(guarded), dial(guarded.link_port) as sock:
        sock.sendall(UPGRADE)
        while b"\r\n\r\n" not in sock.recv(4096):
            pass
        send(sock, said)
        assert read_to_end(sock, 5) is not None, "it was not closed"


@pytest.mark.failure(30)
def test_half_open_and_slow_handshakes_are_closed_at_their_deadline(guarded):
    """Peers that say nothing, half a request, all but the hello, or a mebibyte at most of a frame of a tebibyte; and
    one that says it byte by byte."""
    with ExitStack() as stack:
        socks = [stack.enter_context(dial(guarded.link_port)) for _ in range(200)]
        began = time.monotonic()
        for sock, said in zip(socks, [b"", UPGRADE[:40], UPGRADE, UPGRADE] * 50, strict=True):
            sock.sendall(said)
        for sock in socks[3::4]:
            assert b" 101 " in sock.recv(4096)
        socks[3].sendall(frame(2, b"x" * 2**20, length=2**40))
        socks[7].sendall(frame(2, b"x", length=2**40))
        stop = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                for byte in UPGRADE + b"y" * 1000:
                    socks[0].sendall(bytes([byte]))
                    if stop.wait(0.2):
                        return

        slow = threading.Thread(target=trickle)
        slow.start()
        with undisturbed(guarded):
            pass
        ended = [read_to_end(sock, 15 - (time.monotonic() - began)) for sock in socks]
        stop.set()
        slow.join(5)
    assert None not in ended, "one was not closed"
    assert 9 < time.monotonic() - began < 14


@pytest.mark.failure(30)
def test_a_node_with_another_token_is_refused_and_the_right_ones_stay(guarded, tmp_path, run_node):
    with undisturbed(guarded):
        log = run_node(guarded.link_port, "--cluster-token", "another", until="cluster token")
    assert "refused" in log
    assert not any("stranger" in reason for reason in guarded.client.get("/readyz").json()["reasons"])


@pytest.fixture
def run_node(tmp_path):
    """Runs a Decode node named `stranger` until its log has `until`; the log."""

    def run(link_port: int, *flags: str, until: str) -> str:
        path = tmp_path / "stranger.log"
        words = [sys.executable, "-m", "pdserve", "decode", "--model", "sim-bytes", "--engine", "sim", *flags]
        with path.open("w") as log:
            process = subprocess.Popen(
                [*words, "--node-id", "stranger", "--masters", f"ws://127.0.0.1:{link_port}"], stdout=log, stderr=log
            )
        try:
            deadline = time.monotonic() + 30
            while until not in path.read_text():
                assert time.monotonic() < deadline, path.read_text()
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait(30)
        return path.read_text()

    return run


@contextmanager
def stopped(pid: int):
    """SIGSTOP for as long as the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)


def generations(service) -> set[int]:
    return {node["generation"] for node in service.nodes()}


def dialled_again(service, before: set[int], nodes: int) -> bool:
    return service.ready() and len(generations(service) - before) == nodes


def given_up(service, worker: str) -> bool:
    """Whether the worker has lost its Master, and serves nothing for it."""
    ready = service.client.get(f"{worker}/readyz").status_code == 200
    return not ready and not service.metrics(worker).get('pdserve_leases{state="used"}', 0)


@pytest.mark.failure(26)
def test_a_stopped_process_is_found_by_heartbeat_from_either_side(sim, await_true):
    with sim("--heartbeat-interval", str(INTERVAL), "--sim-decode-ms", "20") as it, ThreadPoolExecutor(1) as pool:
        limit = 3 * INTERVAL
        workers = [node["status_url"] for node in it.nodes()]
        for role in ("decode", "master"):
            before = generations(it)
            running = pool.submit(it.stream, PROMPT, max_tokens=2000)
            it.wait_leases(1)
            with stopped(it.pid(role)) as began:
                if role == "decode":
                    running.result(30).assert_failed()
                    took = time.monotonic() - began
                    assert "decode" not in {node["role"] for node in it.nodes()}
                    assert not it.ready()
                else:
                    await_true(lambda: all(given_up(it, url) for url in workers), 30, "it is still served")
                    took = time.monotonic() - began
            print(f"a stopped {role} was found after {took:.2f} s, three intervals are {limit:g} s")
            assert took < limit + 1.0  # for a busy machine
            if role == "master":
                running.result(30).assert_failed()
            lost = 1 if role == "decode" else 2  # a Master that goes on finds out that both have left
            await_true(partial(dialled_again, it, before, lost), 30, "the nodes are not back")
            assert it.stream(PROMPT).ids == expected(16)
            it.wait_quiet()


@pytest.mark.failure(6)
def test_both_decode_processes_killed_under_load_and_back_again(sim, await_true):
    with sim("--prefill", "2", "--decode", "2", "--sim-decode-ms", "20") as it, ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(it.stream, [50 + i] * 60, max_tokens=900) for i in range(12)]
        leases = 'pdserve_leases{state="used"}'

        def by_role(role: str) -> list[dict[str, float]]:
            return [it.metrics(node["status_url"]) for node in it.nodes() if node["role"] == role]

        await_true(lambda: sum(series[leases] for series in by_role("decode")) == 12, 30, "the load has not begun")
        pids = [int(pid) for pid in re.findall(r"decode(?:-\d+)? starts: pid (\d+)", it.log)]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await_true(lambda: not it.ready(), 5, "readiness does not tell")
        for stream in streams:
            stream.result(30).assert_failed()
        prefills = by_role("prefill")
        assert len(prefills) == 2, "P nodes stay registered"
        answer = it.client.post("/v1/completions", json=it.body(PROMPT))
        assert answer.status_code in (200, 503)  # a Decode process may be back already
        await_true(lambda: it.ready() and len(by_role("decode")) == 2, 60, "service is not back")
        for number in range(8):
            assert it.stream([60 + number, *PROMPT]).done
        assert it.stream(PROMPT).ids == expected(16)
        for series in by_role("prefill") + by_role("decode"):
            for name in ("pdserve_holds", "pdserve_slots_used", 'pdserve_kv_pages{state="pinned"}', leases):
                assert series[name] == 0, name
