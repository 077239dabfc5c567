"""A stream that tells when its peer has ended it, for a layer above that would not notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable


class EndTold(trio.abc.Stream):
    """`stream`, which calls `on_end` when nothing can be received any more.

    trio-websocket waits for a request on a connection that is closed already, until somebody cancels it.
    """

    def __init__(self, stream: trio.abc.Stream, on_end: Callable[[], object]) -> None:
        self._stream = stream
        self._on_end = on_end

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        try:
            data = await self._stream.receive_some(max_bytes)
        except trio.BrokenResourceError:
            self._on_end()
            raise
        if not data:
            self._on_end()
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()
