"""The requests of one Master link on one node: each its own task, found by (id, epoch, choice), ended by Cancel."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs
import trio

from pdserve.errors import FatalError, RequestError, TransferError
from pdserve.nurseries.groups import leaves
from pdserve.wire.deltas import merge_deltas
from pdserve.wire.messages import GROUP, Failed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import msgspec

    from pdserve.nurseries.connection import Connection
    from pdserve.nurseries.forwarder import Outbox
    from pdserve.wire.messages import Delta, NodeStats

log = logging.getLogger("pdserve.worker")

Key = tuple[str, int, int]
"""(request id, epoch, choice)"""


@attrs.define(eq=False)
class Request:
    """One request on this node; its task's scope, and what it waits for, for `/debug/tree`."""

    key: Key
    scope: trio.CancelScope
    since: float
    phase: str = "start"
    hold: Any = None
    """P's hold of the pages, once there is one."""

    def enter(self, phase: str) -> None:
        self.phase, self.since = phase, trio.current_time()


class LinkRequests:
    """What a role needs of a Master link: sending frames, and running a request's task as a child of the connection."""

    def __init__(self, connection: Connection, outbox: Outbox) -> None:
        self._connection = connection
        self._outbox = outbox
        self._requests: dict[tuple[str, int], dict[int, Request]] = {}
        """By (id, epoch), then choice."""

    def send(self, frame: msgspec.Struct) -> None:
        """Queue a control frame."""
        self._outbox.control(frame)

    def emit(self, delta: Delta) -> None:
        """Queue output; deltas of a choice that still wait are merged."""
        self._outbox.data((delta.id, delta.epoch, delta.choice), delta, merge_deltas)

    def report(self, stats: Callable[[], NodeStats]) -> None:
        """Queue a load report; one that still waits is replaced."""
        self._outbox.data("stats", stats(), lambda old, new: new)

    def start(
        self,
        key: Key,
        run: Callable[..., Awaitable[None]],
        *args: Any,  # noqa: ANN401
        nursery: trio.Nursery | None = None,
    ) -> None:
        """Run `run(request, *args)` in a task of its own, of the connection or of `nursery`.

        Its failure becomes a `Failed` frame, never a silent end.
        """
        request = Request(key, trio.CancelScope(), trio.current_time())
        self._requests.setdefault(key[:2], {})[key[2]] = request
        start_soon = self._connection.start_soon if nursery is None else nursery.start_soon
        start_soon(self._run, request, run, *args, name="request {}/{}/{}".format(*key))

    def refuse(self, key: Key, error: RequestError) -> None:
        """Tell the Master that this request ends here with `error`."""
        id_, epoch, choice = key
        self._end(Failed(id_, epoch, error.code, error.message, error.param, choice))

    def __contains__(self, key: Key) -> bool:
        return key[2] in self._requests.get(key[:2], ())

    def find(self, id_: str, epoch: int, choice: int = GROUP) -> list[Request]:
        """The tasks of a request: its own, and those of its choices; or that of one choice."""
        tasks = self._requests.get((id_, epoch), {})
        if choice == GROUP:
            return list(tasks.values())
        return [tasks[choice]] if choice in tasks else []

    def cancel(self, id_: str, epoch: int, choice: int = GROUP) -> None:
        """End them, and forget output that waits."""
        for request in self.find(id_, epoch, choice):
            request.scope.cancel()
            self._outbox.discard(request.key)

    def snapshot(self) -> list[dict[str, object]]:
        now = trio.current_time()
        return [
            {
                "id": r.key[0],
                "epoch": r.key[1],
                "choice": r.key[2],
                "phase": r.phase,
                "seconds": round(now - r.since, 3),
            }
            for tasks in self._requests.values()
            for r in tasks.values()
        ]

    async def _run(self, request: Request, run: Callable[..., Awaitable[None]], *args: object) -> None:
        id_, epoch, choice = request.key
        try:
            with request.scope:
                await run(request, *args)
        except RequestError as error:
            self.refuse(request.key, error)
        except TransferError as error:
            self._end(Failed(id_, epoch, "transfer_failed", f"the KV transfer failed: {error}", None, choice))
        except Exception as error:
            if any(isinstance(leaf, FatalError) for leaf in leaves(error)):
                raise
            log.exception("request %s/%d failed", id_, epoch)
            self._end(Failed(id_, epoch, "worker_failed", "the worker failed while serving this request", None, choice))
        finally:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        id_, epoch, choice = request.key
        tasks = self._requests.get((id_, epoch), {})
        if tasks.get(choice) is request:  # a repeated frame may have taken its place
            del tasks[choice]
            if not tasks:
                del self._requests[id_, epoch]

    def _end(self, frame: Failed) -> None:
        """Queue a failure behind the output that still waits; as a control frame it would overtake it and lose it."""
        self._outbox.data((frame.id, frame.epoch, frame.choice, "failed"), frame, lambda old, new: new)
