"""What goes through HTTP: `pdserve up` with the simulated engine, and bare hypercorn for comparison."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from closed_loop import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).parent
_PATH = "/v1/completions"
_END_TIMEOUT = 45.0


def measure(*, slots: int, queue: int, clients: int, busy: float, steps: int, seconds: float) -> tuple[Tally, Tally]:
    """pdserve, then bare hypercorn with answers of the same size; the same clients. Each request decodes for `steps`
    engine steps, `busy` seconds in all, after the first token, which comes from Prefill.
    """
    request = {"model": "sim-bytes", "prompt": "sixteen letters.", "max_tokens": steps + 1, "ignore_eos": True}
    body = json.dumps(request).encode()
    flags = ("--max-running-requests", slots, "--admission-queue-size", queue, "--sim-decode-ms", busy * 1000 / steps)
    with _service(*map(str, flags)) as port:
        size = len(_once(port, body))
        served = _drive(port, clients, seconds, body)
    with _bare(size) as port:
        return served, _drive(port, clients, seconds, body)


def _once(port: int, body: bytes) -> bytes:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{_PATH}", body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return bytes(response.read())


def _drive(port: int, clients: int, seconds: float, body: bytes) -> Tally:
    words = [sys.executable, str(_HERE / "http_clients.py"), str(port), _PATH, str(clients), str(seconds)]
    ended = subprocess.run(words, input=body, stdout=subprocess.PIPE, timeout=seconds + 60, check=True)
    return Tally(**json.loads(ended.stdout))


@contextmanager
def _service(*flags: str) -> Iterator[int]:
    port, link_port = map(str, _free_ports(2))
    words = [sys.executable, "-m", "pdserve", "up", "--engine", "sim", "--port", port, "--link-port", link_port, *flags]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("pdserve is ready"):
                log.seek(0)
                raise RuntimeError(f"pdserve did not start:\n{log.read()}")
            yield int(port)
        finally:
            process.terminate()
            process.wait(_END_TIMEOUT)


@contextmanager
def _bare(size: int) -> Iterator[int]:
    words = [sys.executable, str(_HERE / "bare.py"), str(size)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
