"""Runs a generation for one client, as a stream or as one document, and lets go of it the moment the client leaves."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from pdserve.errors import WorkerFailedError
from pdserve.http.errors import choice_error_reply, error_reply
from pdserve.http.exchange import ClientGoneError, to_json
from pdserve.http.reply import sse
from pdserve.master.service import ChoiceFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.http.errors import ErrorReply
    from pdserve.http.exchange import Exchange
    from pdserve.http.reply import Meter, Reply
    from pdserve.master.service import GenerationRequest, MasterService

log = logging.getLogger("pdserve.http")

_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)
_QUEUED_EVENTS = 64
"""Deltas between the generation and the writer. When full the generation is not read on; the Master buffers it."""


async def respond_document(
    service: MasterService, request: GenerationRequest, reply: Reply, exchange: Exchange, meter: Meter
) -> None:
    """One JSON response at the end. Raises the generation's error, or ClientGoneError.

    A choice that fails is the generation's error at once: the others are given up.
    """

    async def collect() -> None:
        async with service.generate(request) as generation:
            async for output in generation:
                if isinstance(output, ChoiceFailed):
                    raise output.error
                meter.count(generation, output)
                reply.add(output)

    scope = trio.CancelScope()
    failure = await _while_connected(exchange, scope, collect)
    _raise_end(exchange, scope, failure or _unfinished(meter))
    await exchange.respond(200, reply.document(meter.usage))


async def respond_stream(
    service: MasterService,
    request: GenerationRequest,
    reply: Reply,
    exchange: Exchange,
    meter: Meter,
    *,
    write_timeout: float,
) -> None:
    """Server-sent events. The status line goes out with the first delta; errors before it are raised.

    Later ones become one `data: {"error": …}` event that ends the stream. One of several choices that fails before the
    first delta is such an error of all of them; later it becomes an event of its own, which names `choices[i]`, and the
    others go on: their stream ends without the tail of one that has finished properly.

    The generation is left as soon as the client has gone or one write takes longer than `write_timeout`: it never waits
    for the writer to come back. Raises ClientGoneError then.
    """
    scope = trio.CancelScope()
    events, queue = trio.open_memory_channel[bytes](_QUEUED_EVENTS)

    async def produce() -> None:
        with events:
            async with service.generate(request) as generation:
                async for output in generation:
                    if isinstance(output, ChoiceFailed):
                        if not meter.begun:
                            raise output.error
                        meter.choice_failed(output.choice)
                        await events.send(_error_event(exchange, choice_error_reply(output.error, output.choice)))
                    else:
                        meter.count(generation, output)
                        await events.send(reply.event(output, meter.usage))

    async def write() -> None:
        with queue:
            async for event in queue:
                batch = [event]
                with suppress(trio.WouldBlock, trio.EndOfChannel):
                    while True:
                        batch.append(queue.receive_nowait())
                if not await _write(exchange, b"".join(batch), scope, write_timeout):
                    return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        failure = await _while_connected(exchange, scope, produce)
        events.close()  # also when the generation was cancelled before it ran
    failure = failure or _unfinished(meter)
    if scope.cancel_called or not exchange.started:
        _raise_end(exchange, scope, failure)
    tail = b""
    if failure is not None:
        tail = _failure_event(exchange, failure)
    elif meter.finished:
        tail = reply.tail(meter.usage)
    # The watcher has ended by now: hypercorn cancels its own close if a task still waits in receive().
    with trio.move_on_after(write_timeout):
        await exchange.finish(tail)


async def _while_connected(
    exchange: Exchange, scope: trio.CancelScope, work: Callable[[], Awaitable[None]]
) -> Exception | None:
    """Run `work` inside `scope`, cancelled when the client leaves. Returns what it raised; no watcher is left over."""
    failure: Exception | None = None

    async def watch() -> None:
        await exchange.wait_disconnect()
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            with scope:
                await work()
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    return failure


async def _write(exchange: Exchange, data: bytes, scope: trio.CancelScope, timeout: float) -> bool:
    """False: the client does not read. `scope` has ended then, even if the send itself is shielded and lives on."""
    scope.deadline = trio.current_time() + timeout
    with trio.move_on_after(timeout) as limit:
        if not exchange.started:
            await exchange.start(200, _HEADERS)
        if data:
            await exchange.write(data)
    if limit.cancelled_caught:
        scope.cancel()
        return False
    scope.deadline = float("inf")
    return not scope.cancel_called


def _raise_end(exchange: Exchange, scope: trio.CancelScope, failure: Exception | None) -> None:
    if scope.cancel_called:
        if failure is not None and not error_reply(failure).expected:
            log.error("request %s failed while its client left", exchange.label, exc_info=failure)
        raise ClientGoneError
    if failure is not None:
        raise failure


def _unfinished(meter: Meter) -> Exception | None:
    """A generation that just stops must not look like one that has finished."""
    return None if meter.ended else WorkerFailedError("the generation ended before it was finished")


def _failure_event(exchange: Exchange, failure: Exception) -> bytes:
    reply = error_reply(failure)
    if not reply.expected:
        log.error("request %s failed in its stream", exchange.label, exc_info=failure)
    return _error_event(exchange, reply)


def _error_event(exchange: Exchange, reply: ErrorReply) -> bytes:
    exchange.outcome = reply.outcome
    return sse(to_json(reply.body))
