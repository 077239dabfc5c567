import os
import signal
import subprocess
import sys

import pytest
import trio

from pdserve.nurseries.drain import Drain


@pytest.mark.trio
async def test_start_is_final_and_keeps_the_first_reason(autojump_clock):
    drain = Drain()
    assert not drain.draining
    drain.start("operator")
    drain.start("again")
    assert drain.draining
    assert drain.started.is_set()
    assert drain.reason == "operator"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.trio
async def test_first_signal_drains_second_leaves(number):
    drain = Drain()
    left = trio.Event()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: drain.on_signals(second=left.set, task_status=task_status))
            os.kill(os.getpid(), number)
            await drain.started.wait()
            assert drain.reason == number.name
            assert not left.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            await left.wait()
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_terminal_that_goes_is_never_the_second_signal():
    drain = Drain()
    second = []
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: drain.on_signals(second=lambda: second.append(1), task_status=task_status)
            )
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                await trio.testing.wait_all_tasks_blocked(0.01)
            assert drain.reason == "SIGHUP"
            assert second == []
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_under_nohup_a_terminal_may_go():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    drain = Drain()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda task_status: drain.on_signals(task_status=task_status))
            os.kill(os.getpid(), signal.SIGHUP)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not drain.draining
            nursery.cancel_scope.cancel()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.trio
async def test_a_signal_after_another_reason_is_only_the_first():
    drain = Drain()
    second = []
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: drain.on_signals(
                    second=lambda: second.append(1), signals=[signal.SIGUSR1], task_status=task_status
                )
            )
            drain.start("control pipe closed")
            os.kill(os.getpid(), signal.SIGUSR1)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
    assert drain.reason == "control pipe closed"
    assert second == []


def test_by_default_the_second_signal_exits_with_130():
    program = """
import os, signal, trio
from pdserve.nurseries.drain import Drain
async def main():
    drain = Drain()
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: drain.on_signals(task_status=task_status))
        os.kill(os.getpid(), signal.SIGTERM)
        await drain.started.wait()
        os.kill(os.getpid(), signal.SIGINT)
trio.run(main)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 130


@pytest.mark.trio
async def test_deadline_counts_from_the_start_of_the_drain(autojump_clock):
    drain = Drain()
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain.within, 30)
        await trio.sleep(10)
        drain.start("x")
    assert trio.current_time() - start == pytest.approx(40)
    await drain.within(5)  # past: at once
    assert trio.current_time() - start == pytest.approx(40)


@pytest.mark.trio
async def test_deadline_wait_is_cancelled(autojump_clock):
    drain = Drain()
    for started in (False, True):
        if started:
            drain.start("x")
        with trio.move_on_after(1) as scope:
            await drain.within(30)
        assert scope.cancelled_caught


@pytest.mark.trio
async def test_started_and_cancelled_in_the_same_tick(autojump_clock):
    drain = Drain()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain.within, 0)
            await trio.testing.wait_all_tasks_blocked()
            drain.start("x")
            scope.cancel()
    assert scope.cancelled_caught
