"""The owner's thread, in real time."""

from __future__ import annotations

import threading

import pytest
import trio

from pdserve.errors import FatalError, TransferError
from pdserve.transfer.calls import Call, ThreadCalls

pytestmark = pytest.mark.trio


def call(fn, *args):
    return Call(fn.__name__, fn, args, lambda _: None)


async def test_order_one_thread_and_errors_as_results():
    calls = ThreadCalls(timeout=5)
    error = TransferError("expected")

    def fail():
        raise error

    threads = []

    def note(value):
        threads.append(threading.get_ident())
        return value

    with trio.fail_after(5):
        assert await calls.run([]) == []
        assert await calls.run([call(note, 1), call(fail), call(note, 2)]) == [1, error, 2]
        assert await calls.run([call(note, 3)]) == [3]
        assert await calls.close(lambda: threads.append(threading.get_ident())) is True
    assert len(threads) == 4
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.failure(31)
async def test_hung_call_is_fatal_and_named():
    calls = ThreadCalls(timeout=0.2)
    release = threading.Event()

    def hang():
        release.wait(10)

    try:
        with trio.fail_after(5), pytest.raises(FatalError, match=r"NIXL call hang hung for 0\.2 s"):
            await calls.run([call(int), call(hang)])
        assert await calls.close(lambda: None) is False
    finally:
        release.set()


async def test_deadline_is_per_call_not_per_batch():
    calls = ThreadCalls(timeout=0.5)

    def slow():
        threading.Event().wait(0.2)

    with trio.fail_after(5):
        await calls.run([call(slow)] * 4)
        assert await calls.close(lambda: None) is True


async def test_cancelled_batch_is_finished_before_the_close():
    calls = ThreadCalls(timeout=5)
    order = []

    def slow():
        threading.Event().wait(0.3)
        order.append("slow")

    with trio.move_on_after(0.05):
        await calls.run([call(slow)])
    with trio.fail_after(5):
        assert await calls.close(lambda: order.append("close")) is True
    assert order == ["slow", "close"]


async def test_close_is_bounded_and_survives_a_failure():
    release = threading.Event()
    stuck = ThreadCalls(timeout=5, exit_grace=0.1)
    try:
        with trio.fail_after(2):
            assert await stuck.close(lambda: release.wait(10)) is False
    finally:
        release.set()

    def fail():
        raise TransferError("no")

    with trio.fail_after(2):
        assert await ThreadCalls(timeout=5).close(fail) is True
        assert await ThreadCalls(timeout=5).close(lambda: [][1]) is False


async def test_patient_batch_is_repeated_until_there_is_news():
    calls = ThreadCalls(timeout=5)
    answers = iter([False, [], None, [1]])
    with trio.fail_after(5):
        assert await calls.run([call(int), Call("poll", answers.__next__, (), print)], patience=5) == [0, [1]]
        assert next(answers, None) is None
        assert await calls.run([call(int)], patience=0.02) == [0]
        assert await calls.close(lambda: None) is True


async def test_nudge_ends_the_patience():
    calls = ThreadCalls(timeout=5)
    calls.nudge()  # nothing to end
    with trio.fail_after(3):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(calls.run, [call(int)], 60)
            await trio.sleep(0.05)
            calls.nudge()
            calls.nudge()
        assert await calls.run([call(int)]) == [0]
        calls.nudge()
        assert await calls.run([call(list)]) == [[]]


async def test_close_does_not_wait_for_patience():
    calls = ThreadCalls(timeout=5)
    with trio.move_on_after(0.05):
        await calls.run([call(int)], patience=60)
    with trio.fail_after(1):
        assert await calls.close(lambda: None) is True
