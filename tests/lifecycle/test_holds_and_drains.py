"""Holds that are renewed while a request waits, and nodes that drain while requests are on their way to them."""

from __future__ import annotations

import pytest
import trio

from pdserve.config import DecodeConfig, PrefillConfig
from pdserve.engine.sim import expected_tokens
from pdserve.errors import NoWorkersError, WorkerFailedError
from pdserve.wire.messages import SamplingParams

pytestmark = pytest.mark.trio

BASE = {"model": "sim-bytes", "engine": "sim", "kv_tokens": 4096, "max_running_requests": 4}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt) % 200 + 32 for i in range(length)]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    return expected_tokens(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))


async def test_a_short_hold_is_renewed_as_long_as_the_request_waits(cluster, autojump_clock):
    async with cluster(prefill={"hold_timeout": 3.0}, decode={"faults": "transfer-delay=8"}) as it:
        assert await it.ids(prompt_of(40), max_tokens=5) == expected(prompt_of(40), 5)


async def test_more_prompts_than_prefill_can_hold_wait_their_turn(cluster, autojump_clock):
    limits = {"admission_queue_size": 100, "admission_timeout": 300.0}
    async with cluster(prefill={"kv_tokens": 320}, decode=limits, admission_timeout=300.0) as it:
        wrong = []

        async def ask(i: int) -> None:
            if await it.ids(prompt_of(100, i), max_tokens=30) != expected(prompt_of(100, i), 30):
                wrong.append(i)

        async with trio.open_nursery() as nursery:
            for i in range(40):
                nursery.start_soon(ask, i)
        assert wrong == []


async def test_a_prefill_node_lost_during_the_transfer_is_one_error(cluster, autojump_clock):
    async with cluster(decode={"faults": "transfer-delay=2"}) as it:
        with pytest.raises(WorkerFailedError):
            async with it.master.generate(it.request(prompt_of(40), max_tokens=50)) as output:
                await output.__anext__()
                it.scopes["p0"].cancel()
                del it.nodes[0]
                async for delta in output:
                    assert delta.finish is None
        await it.quiet(within=5)


@pytest.mark.parametrize(("n", "max_tokens"), [(1, 20), (3, 20)])
async def test_a_prefill_node_that_leaves_before_decodes_word_of_the_transfer_costs_no_stream(
    n, max_tokens, cluster, autojump_clock
):
    """The link of Decode is slower, so that the drained Prefill node is gone before the Master hears of the pull."""
    async with cluster(decode={"faults": "transfer-delay=0.1"}) as it:
        p = it.node("p0")
        stream = it.client_ends["d0"].send_stream
        pump = stream.send_all_hook

        async def late() -> None:
            await trio.sleep(0.2)
            await pump()

        stream.send_all_hook = late
        found = []

        async def ask() -> None:
            found.append(await it.choices(prompt_of(40), n, max_tokens=max_tokens))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not p.owner.stats().holds:
                await trio.sleep(0.001)
            await p.drain()
        assert found == [{choice: expected(prompt_of(40), max_tokens) for choice in range(n)}]


async def test_a_drained_prefill_node_of_whose_transfer_nobody_tells_is_an_error_in_time(cluster, autojump_clock):
    async with cluster(decode={"faults": "transfer-delay=6"}, prefill={"drain_timeout": 1.0}) as it:
        p = it.node("p0")
        with pytest.raises(WorkerFailedError):
            async with it.master.generate(it.request(prompt_of(40), max_tokens=50)) as output:
                await anext(output)
                await p.drain()
                left = trio.current_time()
                async for delta in output:
                    assert delta.finish is None
        assert trio.current_time() - left < 4
        await it.quiet(within=10)


@pytest.mark.parametrize("index", [0, 1])
async def test_a_node_that_drains_before_the_master_has_heard_is_passed_over(index, cluster, autojump_clock):
    async with cluster(decodes=2, decode={"admission_queue_size": 100}) as it:
        await it.start(PrefillConfig(**BASE, node_id="p1"))
        it.nodes[index].role.draining = True
        for i in range(10):
            assert await it.ids(prompt_of(30, i), max_tokens=3) == expected(prompt_of(30, i), 3)


@pytest.mark.parametrize("index", [0, 1])
async def test_where_every_node_drains_the_service_is_unavailable_not_busy(index, cluster, autojump_clock):
    async with cluster() as it:
        it.nodes[index].role.draining = True
        with pytest.raises(NoWorkersError):
            await it.ids(prompt_of(30), max_tokens=3)
        await it.quiet()


async def test_a_node_that_loses_its_pages_to_a_transfer_without_end_drains_and_ends_to_be_replaced(
    cluster, autojump_clock
):
    config = {**BASE, "node_id": "d0", "kv_tokens": 1024, "faults": "transfer-delay=100000", "drain_timeout": 20.0}
    async with cluster(decodes=0) as it:
        stuck = await it.start(DecodeConfig(**config))
        it.dead.add(stuck.incarnation)
        with trio.move_on_after(1):
            await it.ids(prompt_of(300), max_tokens=5)
        await trio.sleep(0.1)
        assert stuck.owner.stats().quarantined == 19
        with trio.fail_after(10):
            while not stuck.role.draining:
                await trio.sleep(0.1)
        with trio.fail_after(25):
            while stuck in it.nodes:
                await trio.sleep(0.1)
        assert it.registry.nodes("decode") == []
        await it.start(DecodeConfig(**{**config, "faults": ""}))
        assert await it.ids(prompt_of(300), max_tokens=5) == expected(prompt_of(300), 5)
