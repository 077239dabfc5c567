"""Tasks that the body needs until its end."""

from __future__ import annotations

import pytest
import trio

from pdserve.nurseries.groups import leaves
from pdserve.nurseries.shelter import sheltered_nursery

pytestmark = pytest.mark.trio


async def test_its_tasks_outlive_the_cancellation_of_the_body_and_end_with_it(autojump_clock):
    asked, answered = trio.Event(), trio.Event()

    async def peer() -> None:
        await asked.wait()
        answered.set()
        await trio.sleep_forever()

    with trio.move_on_after(1) as outside:
        async with sheltered_nursery() as nursery:
            nursery.start_soon(peer)
            try:
                await trio.sleep_forever()
            finally:
                with trio.fail_after(1, shield=True):
                    asked.set()
                    await answered.wait()
    assert outside.cancelled_caught
    assert trio.current_time() - outside.deadline < 0.1


async def test_the_failure_of_one_ends_the_body(autojump_clock):
    async def fail() -> None:
        await trio.sleep(1)
        raise ValueError("broken")

    with pytest.raises(ExceptionGroup) as caught, trio.fail_after(2):
        async with sheltered_nursery() as nursery:
            nursery.start_soon(fail)
            await trio.sleep_forever()
    assert [str(leaf) for leaf in leaves(caught.value)] == ["broken"]


async def test_a_body_that_returns_ends_them():
    async with sheltered_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
