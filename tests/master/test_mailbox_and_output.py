"""Frames from link reader to coordinator to client: merged, in order, contiguous, one end."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from pdserve.errors import WorkerFailedError
from pdserve.master.mailbox import AttemptMailbox, NodeLost
from pdserve.master.output import GenerationOutput
from pdserve.master.service import ChoiceFailed
from pdserve.wire.messages import Admitted, Delta, Settled

pytestmark = pytest.mark.trio


def delta(start: int, *ids: int, text: str = "", finish=None, choice: int = 0) -> Delta:
    return Delta("r", 1, start, ids, text, (), finish, choice=choice)


async def next_of(box: AttemptMailbox):
    await box.arrival()
    return box.take()


async def test_frames_come_in_order_and_neighbouring_deltas_as_one(autojump_clock):
    box = AttemptMailbox()
    for frame in (
        Admitted("r", 1),
        delta(0, 1, text="a"),
        delta(1, 2, 3, text="b"),
        Settled("r", 1),
        delta(3, 4),
        delta(4, 5, finish="stop"),
    ):
        box.deliver(None, frame)
    assert [await next_of(box) for _ in range(3)] == [
        Admitted("r", 1),
        delta(0, 1, 2, 3, 4, 5, text="ab", finish="stop"),
        Settled("r", 1),
    ]


async def test_interleaved_choices_are_merged_each_by_itself(autojump_clock):
    box = AttemptMailbox()
    for i in range(100):
        for choice in range(3):
            box.deliver(None, delta(i, i, choice=choice))
    assert [await next_of(box) for _ in range(3)] == [delta(0, *range(100), choice=choice) for choice in range(3)]
    box.deliver(None, delta(100, 7, choice=1))
    assert await next_of(box) == delta(100, 7, choice=1)


async def test_a_gap_a_duplicate_and_what_follows_a_finish_are_not_merged_away(autojump_clock):
    box = AttemptMailbox()
    frames = [delta(0, 1), delta(2, 3), delta(2, 3), delta(3, 4, finish="stop"), delta(4, 5)]
    for frame in frames:
        box.deliver(None, frame)
    assert [await next_of(box) for _ in range(4)] == [frames[0], frames[1], delta(2, 3, 4, finish="stop"), frames[4]]


async def test_a_reader_that_waits_is_woken_by_a_frame_and_by_a_loss(autojump_clock):
    box = AttemptMailbox()

    async def put():
        await trio.sleep(1)
        box.deliver(None, Settled("r", 1))
        await trio.sleep(1)
        box.lost(None, "gone")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(put)
        with trio.fail_after(3):
            assert await next_of(box) == Settled("r", 1)
            assert await next_of(box) == NodeLost(None, "gone")
    with trio.move_on_after(1) as scope:
        await next_of(box)
    assert scope.cancelled_caught


async def test_output_is_iterated_to_its_finish(autojump_clock):
    output = GenerationOutput(7)
    assert not output.started
    output.put(delta(0, 1))
    output.put(delta(1, 2, finish="length"))
    assert output.started
    assert [d.token_ids async for d in output] == [(1,), (2,)]
    output.fail(WorkerFailedError("too late"))
    assert [d async for d in output] == []
    assert output.prompt_tokens == 7


@pytest.mark.parametrize("start", [0, 2, 5])
async def test_a_gap_or_a_duplicate_is_an_error(start, autojump_clock):
    output = GenerationOutput(1)
    output.put(delta(0, 1))
    with pytest.raises(WorkerFailedError, match="jumped from token 1"):
        output.put(delta(start, 9))


async def test_an_error_comes_after_what_was_put_and_the_first_one_stays(autojump_clock):
    output = GenerationOutput(1)
    output.put(delta(0, 1))
    output.fail(WorkerFailedError("first"))
    output.fail(WorkerFailedError("second"))
    assert (await output.__anext__()).token_ids == (1,)
    for _ in range(2):
        with pytest.raises(WorkerFailedError, match="first"):
            await output.__anext__()


async def test_a_reader_that_waits_is_woken_by_the_error(autojump_clock):
    output = GenerationOutput(1)

    async def fail():
        await trio.sleep(1)
        output.fail(WorkerFailedError("gone"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        with trio.fail_after(2), pytest.raises(WorkerFailedError, match="gone"):
            await output.__anext__()


async def test_one_choice_fails_and_the_others_go_on_to_their_end(autojump_clock):
    output = GenerationOutput(7, 3)
    output.put(delta(0, 1, choice=1))
    output.put(delta(0, 5, finish="stop", choice=0))
    error = WorkerFailedError("choice 1")
    output.fail_choice(1, error)
    output.put(delta(0, 6, finish="length", choice=2))
    output.fail(WorkerFailedError("too late"))
    assert [item async for item in output] == [
        delta(0, 1, choice=1),
        delta(0, 5, finish="stop", choice=0),
        ChoiceFailed(1, error),
        delta(0, 6, finish="length", choice=2),
    ]


async def test_a_choice_that_has_ended_takes_no_more_output(autojump_clock):
    output = GenerationOutput(7, 2)
    output.put(delta(0, 5, finish="stop", choice=0))
    with pytest.raises(WorkerFailedError):
        output.put(delta(1, 6, choice=0))
    output.put(delta(0, 6, choice=1))
