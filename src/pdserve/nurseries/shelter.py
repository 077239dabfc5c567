"""A nursery for tasks that the body needs until its very end, also when it is cancelled from outside."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def sheltered_nursery() -> AsyncIterator[trio.Nursery]:
    """Its tasks run until the body has ended, however that is, and are cancelled then; their failures end the body.

    trio-websocket's reader lives here: without it the closing handshake of a body that is cancelled hears no answer.
    """
    async with trio.open_nursery() as outer:
        nursery: trio.Nursery = await outer.start(_keep)
        try:
            yield nursery
        finally:
            nursery.cancel_scope.cancel()


async def _keep(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()
