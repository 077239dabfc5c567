"""Bare hypercorn on Trio: reads the body, answers JSON of a given size. The reference for what goes through HTTP.

python bare.py SIZE: prints its port, serves on loopback until its standard input ends.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import trio
from hypercorn.config import Config
from hypercorn.trio import serve


def application(size: int) -> Any:  # noqa: ANN401 - an ASGI 3 callable
    body = b'{"text": "' + b"x" * (size - 12) + b'"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        if scope["type"] != "http":
            raise RuntimeError("HTTP only")  # tells hypercorn that there is no lifespan
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


async def main(size: int) -> None:
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.backlog = 1024
    config.keep_alive_max_requests = 1_000_000
    async with trio.lowlevel.FdStream(os.dup(0)) as parent, trio.open_nursery() as nursery:

        async def ended() -> None:
            await parent.receive_some()

        run = partial(serve, application(size), config, shutdown_trigger=ended)
        (url,) = await nursery.start(run)
        print(urlsplit(url).port, flush=True)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
