"""A closed loop of HTTP clients, each on one kept-alive connection. Does as little as possible: it shares the cores.

python http_clients.py PORT PATH CLIENTS SECONDS, the body of all requests on standard input; prints a tally as JSON.
"""

from __future__ import annotations

import json
import re
import sys

import attrs
import trio
from closed_loop import closed_loop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Client:
    def __init__(self, stream: trio.SocketStream, request: bytes) -> None:
        self._stream = stream
        self._request = request

    async def ask(self) -> bool:
        """False when the service is busy. Raises RuntimeError for any other answer than 200."""
        await self._stream.send_all(self._request)
        answer = b""
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += await self._receive()
        length = _LENGTH.search(answer, 0, end + 2)
        if length is None:
            raise RuntimeError(f"no content-length in {answer[:end]!r}")
        while len(answer) < end + 4 + int(length[1]):
            answer += await self._receive()
        status = answer[9:12]
        if status not in (b"200", b"429"):
            raise RuntimeError(f"unexpected answer {answer[:500]!r}")
        return status == b"200"

    async def _receive(self) -> bytes:
        data = await self._stream.receive_some()
        if not data:
            raise RuntimeError("the server has closed the connection")
        return bytes(data)


async def main(port: int, path: str, clients: int, seconds: float, body: bytes) -> None:
    head = (f"POST {path} HTTP/1.1", "host: bench", "content-type: application/json", f"content-length: {len(body)}")
    request = "\r\n".join((*head, "", "")).encode() + body
    connected = [Client(await trio.open_tcp_stream("127.0.0.1", port), request) for _ in range(clients)]
    tally = await closed_loop(lambda i: connected[i].ask(), clients=clients, warm_up=2.0, seconds=seconds)
    print(json.dumps(attrs.asdict(tally)))


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.stdin.buffer.read())
