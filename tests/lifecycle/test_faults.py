"""What goes wrong around a running request in virtual time; afterwards every pool is at zero."""

from __future__ import annotations

import pytest
import trio

from pdserve.config import DecodeConfig, PrefillConfig
from pdserve.engine.sim import END_TOKEN, expected_tokens
from pdserve.errors import InvalidRequestError, NoWorkersError, ServerBusyError, WorkerFailedError
from pdserve.wire.messages import SamplingParams

pytestmark = pytest.mark.trio

STEP = 0.005
BASE = {"model": "sim-bytes", "engine": "sim", "kv_tokens": 4096, "max_running_requests": 4}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt) % 200 + 32 for i in range(length)]


def expected(prompt: list[int], max_tokens: int, **params) -> list[int]:
    return expected_tokens(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, **params))


async def test_a_prefix_cached_on_decode_only_gives_the_same_output(cluster, autojump_clock):
    async with cluster() as it:
        for length in (15, 16, 17, 33, 64, 70):
            await it.ids(prompt_of(length, length), max_tokens=9)
        it.scopes["p0"].cancel()
        del it.nodes[0]
        await trio.sleep(1)
        await it.start(PrefillConfig(**BASE, node_id="p9"))
        for length in (15, 16, 17, 33, 64, 70):
            prompt = prompt_of(length, length)
            async with it.master.generate(it.request(prompt, max_tokens=9)) as output:
                assert [token async for delta in output for token in delta.token_ids] == expected(prompt, 9)
            assert output.cached_tokens == 0


@pytest.mark.parametrize(
    ("faults", "within"),
    [
        ({}, STEP),
        # A running transfer keeps its pages until it is terminal, and a prefill step lasts as long as its 40 tokens.
        ({"decode": {"faults": "transfer-delay=0.03"}}, 0.04),
        ({"prefill": {"faults": "omit-first-token"}, "decode": {"faults": "transfer-delay=0.03"}}, 0.04),
        ({"prefill": {"sim_prefill_tokens_per_s": 1000.0}}, 0.04),
    ],
)
async def test_a_cancel_at_any_instant_gives_all_back_within_a_step(faults, within, cluster, autojump_clock):
    async with cluster(**faults) as it:
        for k in range(1, 60):
            with trio.move_on_after(0.0011 * k):
                await it.ids(prompt_of(40, salt=k), max_tokens=1000)
            await it.quiet(within=within + 0.002)
        assert await it.ids(prompt_of(40), max_tokens=5) == expected(prompt_of(40), 5)


@pytest.mark.failure(2)
async def test_a_cancel_during_a_transfer_frees_slot_and_lease_at_once_but_not_the_pages(cluster, autojump_clock):
    async with cluster(decode={"faults": "transfer-delay=1.0"}) as it:
        decode = it.nodes[1]
        with trio.move_on_after(0.5):
            await it.ids(prompt_of(40), max_tokens=1000)
        await trio.sleep(STEP)
        assert (decode.slots.used, decode.role.pool.active) == (0, 0)
        assert decode.cache.counts().quarantined == 3
        await it.quiet(within=1.0)


async def test_a_cancel_while_waiting_for_a_slot_leaves_the_queue(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 1}) as it:
        async with it.master.generate(it.request(prompt_of(5), max_tokens=4000)) as running:
            await running.__anext__()
            with trio.move_on_after(1):
                await it.ids(prompt_of(6), max_tokens=5)
            await trio.sleep(STEP)
            assert it.nodes[1].role.pool.queued == 0
            assert it.nodes[0].owner.stats().holds == 0
        await it.quiet(within=STEP + 0.002)


async def test_busy_decode_gives_back_what_prefill_holds(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 1, "admission_queue_size": 0}) as it:
        async with it.master.generate(it.request(prompt_of(5), max_tokens=4000)) as running:
            await running.__anext__()
            for i in range(5):
                with pytest.raises(ServerBusyError) as caught:
                    await it.ids(prompt_of(40, i), max_tokens=5)
                assert caught.value.reason == "queue_full"
            await trio.sleep(0.01)
            it.nodes[0].check_integrity(quiet=True)
        await it.quiet()
        assert len(await it.ids(prompt_of(40), max_tokens=5)) == 5


async def test_a_full_decode_node_is_passed_over_for_one_with_room(cluster, autojump_clock):
    limits = {"max_running_requests": 1, "admission_queue_size": 0}
    async with cluster(decode=limits, decodes=2) as it:
        async with it.master.generate(it.request(prompt_of(5), max_tokens=1000)) as running:
            await running.__anext__()
            for i in range(8):
                assert await it.ids(prompt_of(20, i), max_tokens=3) == expected(prompt_of(20, i), 3)


async def test_an_answer_that_never_fits_is_refused_by_decode(cluster, autojump_clock):
    async with cluster(decode={"kv_tokens": 160}) as it:
        with pytest.raises(InvalidRequestError, match="KV pages") as caught:
            await it.ids(prompt_of(100), max_tokens=100)
        assert caught.value.param == "max_tokens"
        await it.quiet()


@pytest.mark.parametrize("max_tokens", [1, 2, 10])
async def test_eos_as_the_first_token_needs_no_transfer(max_tokens, cluster, autojump_clock):
    async with cluster(decode={"faults": "transfer-fail=-1"}) as it:
        async with it.master.generate(it.request([70, 71, END_TOKEN], max_tokens=max_tokens)) as output:
            (delta,) = [delta async for delta in output]
        assert delta.token_ids == (min(it.nodes[1].loop.engine.eos_token_ids),)
        assert delta.finish == "stop"


async def test_a_failed_transfer_without_first_token_is_an_error_without_output(cluster, autojump_clock):
    async with cluster(prefill={"faults": "omit-first-token"}, decode={"faults": "transfer-fail=1"}) as it:
        with pytest.raises(WorkerFailedError, match="transfer"):
            async with it.master.generate(it.request(prompt_of(40), max_tokens=2)) as output:
                async for delta in output:
                    pytest.fail(f"output after a failed transfer: {delta}")
        await it.quiet()
        assert await it.ids(prompt_of(40), max_tokens=2) == expected(prompt_of(40), 2)


async def test_a_prefill_node_lost_while_it_computes_is_replaced_by_another(cluster, autojump_clock):
    async with cluster(prefill={"sim_prefill_tokens_per_s": 100.0}) as it:
        result = []

        async def ask():
            result.extend(await it.ids(prompt_of(50), max_tokens=5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.1)
            await it.start(PrefillConfig(**BASE, node_id="p1"))
            it.scopes["p0"].cancel()
            del it.nodes[0]
        assert result == expected(prompt_of(50), 5)


async def test_a_prefill_node_lost_after_the_transfer_is_not_missed(cluster, autojump_clock):
    async with cluster() as it:
        async with it.master.generate(it.request(prompt_of(50), max_tokens=100)) as output:
            ids = list((await output.__anext__()).token_ids)
            await trio.sleep(0.1)
            it.scopes["p0"].cancel()
            del it.nodes[0]
            ids += [token async for delta in output for token in delta.token_ids]
        assert ids == expected(prompt_of(50), 100)
        with pytest.raises(NoWorkersError, match="Prefill"):
            await it.ids([65], max_tokens=1)


async def test_two_losses_before_any_output_are_an_error(cluster, autojump_clock):
    async with cluster(prefill={"sim_prefill_tokens_per_s": 100.0}) as it:
        await it.start(PrefillConfig(**{**BASE, "node_id": "p1", "sim_prefill_tokens_per_s": 100.0}))

        async def lose():
            for name in ("p0", "p1"):
                await trio.sleep(0.1)
                it.scopes[name].cancel()
                it.nodes = [node for node in it.nodes if node.node_id != name]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            with pytest.raises((WorkerFailedError, NoWorkersError)):
                await it.ids(prompt_of(200), max_tokens=5)


async def test_without_retry_a_lost_node_is_an_error(cluster, autojump_clock):
    async with cluster(prefill={"sim_prefill_tokens_per_s": 100.0}, decodes=1, retry=False) as it:
        await it.start(PrefillConfig(**BASE, node_id="p1"))
        it.scopes["p1"].cancel()
        it.nodes.pop()
        await trio.sleep(0.1)

        async def lose():
            await trio.sleep(0.1)
            it.scopes["p0"].cancel()
            del it.nodes[0]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            with pytest.raises(WorkerFailedError, match="p0"):
                await it.ids(prompt_of(200), max_tokens=5)


@pytest.mark.failure(26)
@pytest.mark.parametrize("role", ["p0", "d0"])
async def test_a_node_that_falls_silent_is_lost_within_its_heartbeats_and_dials_again(role, cluster, autojump_clock):
    async with cluster(heartbeat_interval=1.0, prefill={"heartbeat_interval": 1.0}) as it:
        (before,) = [node for node in it.registry.nodes() if node.node_id == role]
        it.mute(role)
        began = trio.current_time()
        with trio.fail_after(30):
            while before in it.registry.nodes():
                await trio.sleep(0.1)
        assert trio.current_time() - began <= 3.5
        await trio.sleep(20)  # the node has noticed as well, by its own heartbeat
        (after,) = [node for node in it.registry.nodes() if node.node_id == role]
        assert after.generation > before.generation
        assert await it.ids(prompt_of(20), max_tokens=5) == expected(prompt_of(20), 5)


@pytest.mark.failure(30)
async def test_a_malformed_frame_costs_that_link_and_nothing_else(cluster, autojump_clock):
    async with cluster(decodes=2) as it:
        (victim,) = [node for node in it.registry.nodes() if node.node_id == "d1"]
        it.nodes[2].links[0]._requests._outbox._encode = lambda frame: b"\xc1garbage"
        it.nodes[2].links[0].report()
        await trio.sleep(0.05)
        assert victim not in it.registry.nodes()
        assert {node.node_id for node in it.registry.nodes()} >= {"p0", "d0"}
        assert len(await it.ids(prompt_of(20), max_tokens=5)) == 5
        await trio.sleep(5)
        assert "d1" in {node.node_id for node in it.registry.nodes()}


@pytest.mark.failure(30)
async def test_a_worker_with_another_token_is_refused_without_a_trace(cluster, autojump_clock):
    async with cluster() as it:
        with pytest.raises(trio.TooSlowError):
            await it.start(DecodeConfig(**BASE, node_id="stranger", cluster_token="wrong"))
        stranger = it.nodes.pop()
        assert "cluster token" in stranger.links[0].state
        assert not any("stranger" in reason for reason in it.master.readiness().reasons)


async def test_a_draining_node_stays_until_its_last_stream_is_over(cluster, autojump_clock):
    async with cluster() as it:
        decode = it.nodes[1]
        async with it.master.generate(it.request(prompt_of(5), max_tokens=200)) as output:
            ids = list((await output.__anext__()).token_ids)
            it.nursery.start_soon(decode.drain)
            ids += [token async for delta in output for token in delta.token_ids]
        assert ids == expected(prompt_of(5), 200)
        await trio.sleep(1)
        assert it.registry.nodes("decode") == []


async def test_the_queue_of_prefill_counts_tokens_and_takes_one_long_prompt(cluster, autojump_clock):
    async with cluster(prefill={"prefill_queue_tokens": 100, "sim_prefill_tokens_per_s": 1000.0}) as it:
        assert len(await it.ids(prompt_of(500), max_tokens=2)) == 2

        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.ids, prompt_of(400, 1))
            await trio.sleep(0.05)
            with pytest.raises(ServerBusyError) as caught:
                await it.ids(prompt_of(10, 2))
            assert caught.value.reason == "prefill_queue_full"


async def test_a_lost_node_is_named_with_the_reason_until_it_is_back(cluster, autojump_clock):
    async with cluster() as it:
        it.cut("d0")
        await trio.sleep(0.01)
        assert any(reason.startswith("lost decode d0: ") for reason in it.master.readiness().reasons)
        with trio.fail_after(10):
            while not it.master.readiness().ready:
                await trio.sleep(0.1)
        assert it.master.readiness().reasons == ()
