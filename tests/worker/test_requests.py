"""The requests of one link: tasks found by key, ended by cancel, failures told as frames."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from pdserve.errors import FatalError, InvalidRequestError, TransferError, WorkerFailedError
from pdserve.nurseries.forwarder import Outbox
from pdserve.wire.codec import decode_from_node, encode
from pdserve.wire.deltas import merge_deltas
from pdserve.wire.messages import Delta, Failed, NodeStats
from pdserve.worker.requests import LinkRequests

pytestmark = pytest.mark.trio

KEY = ("r", 1, 0)


def sent(outbox: Outbox) -> list[object]:
    frames = []
    while (data := outbox.take()) is not None:
        frames.append(decode_from_node(data))
    return frames


async def forever(request):
    await trio.sleep_forever()


@asynccontextmanager
async def link():
    outbox = Outbox(encode=encode)
    async with trio.open_nursery() as nursery:
        yield LinkRequests(nursery, outbox), outbox
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "frame"),
    [
        (
            InvalidRequestError("too long", param="prompt"),
            Failed("r", 1, "invalid_request", "too long", "prompt"),
        ),
        (WorkerFailedError("no"), Failed("r", 1, "worker_failed", "no")),
        (TransferError("stale"), Failed("r", 1, "transfer_failed", "the KV transfer failed: stale")),
    ],
)
async def test_a_failure_becomes_a_frame(error, frame, autojump_clock):
    async def fail(request):
        raise error

    async with link() as (requests, outbox):
        requests.start(KEY, fail)
        assert KEY in requests
        await trio.testing.wait_all_tasks_blocked()
        assert KEY not in requests
        assert sent(outbox) == [frame]


async def test_a_bug_is_told_without_its_details_and_leaves_the_others_alone(autojump_clock):
    async def bug(request):
        raise KeyError("secret")

    async with link() as (requests, outbox):
        requests.start(("other", 1, 0), forever)
        requests.start(KEY, bug)
        await trio.testing.wait_all_tasks_blocked()
        (frame,) = sent(outbox)
        assert isinstance(frame, Failed)
        assert (frame.code, "secret" in frame.message) == ("worker_failed", False)
        assert ("other", 1, 0) in requests


async def test_a_fatal_error_gets_out(autojump_clock):
    async def die(request):
        raise FatalError("engine")

    with pytest.RaisesGroup(pytest.RaisesExc(FatalError, match="engine")):
        async with link() as (requests, _):
            requests.start(KEY, die)
            await trio.sleep(1)


async def test_cancel_ends_every_choice_of_that_epoch_and_no_other(autojump_clock):
    async with link() as (requests, outbox):
        keys = [("r", 1, 0), ("r", 1, 1), ("r", 2, 0), ("s", 1, 0)]
        for key in keys:
            requests.start(key, forever)
            requests.emit(Delta(key[0], key[1], 0, (1,), choice=key[2]))
        requests.cancel("r", 1)
        requests.cancel("unknown", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert [key in requests for key in keys] == [False, False, True, True]
        assert [(frame.id, frame.epoch) for frame in sent(outbox)] == [("r", 2), ("s", 1)]
        assert requests.find("r", 1) == []


async def test_a_key_used_twice_ends_cleanly(autojump_clock):
    async with link() as (requests, _):
        release = trio.Event()
        for _ in range(2):
            requests.start(KEY, lambda request: release.wait())
        release.set()
        await trio.testing.wait_all_tasks_blocked()
        assert KEY not in requests


async def test_control_goes_first_deltas_are_merged_and_reports_replaced(autojump_clock):
    async with link() as (requests, outbox):
        requests.emit(Delta("r", 1, 0, (1,), "a"))
        requests.report(lambda: NodeStats(active=1))
        requests.emit(Delta("r", 1, 1, (2,), "b", finish="stop"))
        requests.report(lambda: NodeStats(active=2))
        requests.send(Failed("s", 1, "worker_failed", "x"))
        assert sent(outbox) == [
            Failed("s", 1, "worker_failed", "x"),
            Delta("r", 1, 0, (1, 2), "ab", finish="stop"),
            NodeStats(active=2),
        ]


async def test_the_snapshot_says_the_phase_and_for_how_long(autojump_clock):
    async def run(request):
        await trio.sleep(1)
        request.enter("decode")
        await trio.sleep_forever()

    async with link() as (requests, _):
        requests.start(KEY, run)
        await trio.sleep(3)
        (row,) = requests.snapshot()
        assert (row["id"], row["phase"], row["seconds"]) == ("r", "decode", 2.0)


async def test_a_gap_between_deltas_is_a_bug():
    with pytest.raises(ValueError, match="jumps from 1 to 2"):
        merge_deltas(Delta("r", 1, 0, (1,)), Delta("r", 1, 2, (2,)))


async def test_a_failure_does_not_overtake_the_output_before_it(autojump_clock):
    delta = Delta("r", 1, 0, (7,), "x")

    async with link() as (requests, outbox):

        async def run(request):
            requests.emit(delta)
            raise TransferError("gone")

        requests.start(KEY, run)
        await trio.testing.wait_all_tasks_blocked()
        first, second = sent(outbox)
        assert first == delta
        assert isinstance(second, Failed)
