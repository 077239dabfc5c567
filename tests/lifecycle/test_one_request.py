"""One request through P and D in virtual time: output, cancellation, limits and failures."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from lifecycle.cluster import note_grants
from pdserve.config import DecodeConfig
from pdserve.engine.sim import expected_tokens
from pdserve.errors import DeadlineExceededError, NoWorkersError, ServerBusyError, WorkerFailedError
from pdserve.wire.messages import SamplingParams

STEP = 0.005
BASE = {"model": "sim-bytes", "engine": "sim", "kv_tokens": 4096, "max_running_requests": 4}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt) % 200 + 32 for i in range(length)]


@pytest.mark.trio
async def test_output_is_the_same_around_every_page_border_cold_and_cached(cluster, autojump_clock):
    async with cluster() as it:
        for length in [*range(1, 50), 63, 64, 65, 300, 1000]:
            prompt = prompt_of(length, salt=length)
            want = expected_tokens(prompt, SamplingParams(max_tokens=20, temperature=0.0))
            assert await it.ids(prompt, max_tokens=20) == want, f"cold, {length} tokens"
            assert await it.ids(prompt, max_tokens=20) == want, f"cached, {length} tokens"


@pytest.mark.trio
async def test_a_prefix_cached_on_prefill_only_gives_the_same_output(cluster, autojump_clock):
    async with cluster(decodes=1) as it:
        prompt = prompt_of(80)
        want = await it.ids(prompt, max_tokens=9)
        it.scopes["d0"].cancel()
        it.nodes.pop()
        await trio.sleep(1)
        await it.start(DecodeConfig(**BASE, node_id="d9"))
        async with it.master.generate(it.request(prompt, max_tokens=9)) as output:
            assert [token async for delta in output for token in delta.token_ids] == want
        assert output.cached_tokens == 64


@pytest.mark.trio
@pytest.mark.parametrize("tokens", [0.5, 1.5, 2.5, 3.5, 10.5])
async def test_a_client_that_leaves_frees_slot_and_pages_within_one_step(tokens, cluster, autojump_clock):
    async with cluster() as it:
        with trio.move_on_after(STEP * tokens):
            await it.ids(prompt_of(100), max_tokens=1000)
        await it.quiet(within=STEP * 1.01)
        assert len(await it.ids(prompt_of(5), max_tokens=3)) == 3


@pytest.mark.trio
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(cluster, autojump_clock):
    async with cluster(prefill={"sim_prefill_tokens_per_s": 2000.0}, decode={"faults": "transfer-delay=0.02"}) as it:
        for k in range(80):
            with trio.move_on_after(0.001 * (k + 0.5)):
                await it.ids(prompt_of(40, salt=k), max_tokens=50)
            await it.quiet(within=0.2)
        assert await it.ids([65, 66], max_tokens=4) == expected_tokens(
            [65, 66], SamplingParams(max_tokens=4, temperature=0.0)
        )


@pytest.mark.failure(20)
@pytest.mark.trio
async def test_the_first_token_is_there_before_the_transfer_has_finished(cluster, autojump_clock):
    async with cluster(decode={"faults": "transfer-delay=2.0"}) as it:
        began, times = trio.current_time(), []
        async with it.master.generate(it.request(prompt_of(40), max_tokens=3)) as output:
            async for _ in output:
                times.append(trio.current_time() - began)
        assert times[0] < 0.5
        assert times[1] > 2.0


@pytest.mark.trio
async def test_without_a_first_token_from_prefill_the_output_is_the_same(cluster, autojump_clock):
    async with cluster(prefill={"faults": "omit-first-token"}) as it:
        for length in (1, 15, 16, 17, 32, 33):
            want = expected_tokens(prompt_of(length), SamplingParams(max_tokens=6, temperature=0.0))
            for _ in range(2):
                assert await it.ids(prompt_of(length), max_tokens=6) == want


@pytest.mark.trio
@pytest.mark.parametrize("max_tokens", [2, 20])
async def test_a_failed_transfer_is_an_error_and_never_a_finish(max_tokens, cluster, autojump_clock):
    async with cluster(decode={"faults": "transfer-fail=-1"}) as it:
        async with it.master.generate(it.request(prompt_of(40), max_tokens=max_tokens)) as output:
            deltas = []
            with pytest.raises(WorkerFailedError, match="transfer"):
                async for delta in output:
                    deltas.append(delta)
        assert all(delta.finish is None for delta in deltas)
        await it.quiet()
        assert len(await it.ids(prompt_of(40), max_tokens=1)) == 1  # needs no transfer


@pytest.mark.trio
async def test_one_token_and_eos_first_are_admitted_and_finish(cluster, autojump_clock):
    async with cluster() as it:
        assert len(await it.ids(prompt_of(33), max_tokens=1)) == 1
        async with it.master.generate(it.request([70, 71, 4], max_tokens=10)) as output:
            (delta,) = [delta async for delta in output]
        assert delta.finish == "stop"
        assert b"pdserve_admission_wait_seconds_count 2.0" in it.nodes[1].metrics.render()


@pytest.mark.trio
async def test_frames_of_one_burst_are_granted_in_their_order(cluster, autojump_clock):
    async with cluster(
        decode={"max_running_requests": 2, "admission_queue_size": 500, "admission_timeout": 500.0},
        prefill={"max_running_requests": 200, "kv_tokens": 65536, "hold_share": 1.0},
        admission_timeout=500.0,
    ) as it:
        arrived, role = [], it.nodes[1].role
        accept, granted = role.accept_decode, note_grants(role)

        def note(frame, link):
            arrived.append(frame.id)
            accept(frame, link)

        role.accept_decode = note
        async with trio.open_nursery() as nursery:
            for i in range(200):
                nursery.start_soon(partial(it.ids, prompt_of(10, salt=i), max_tokens=3))
        assert len(granted) == 200
        assert granted == arrived


@pytest.mark.trio
async def test_a_full_decode_node_is_busy_at_once_and_a_waiting_one_at_its_deadline(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 1, "admission_queue_size": 1}, admission_timeout=2.0) as it:
        async with it.master.generate(it.request(prompt_of(5), max_tokens=4000)) as running:
            await running.__anext__()
            async with trio.open_nursery() as nursery:
                reasons = []

                async def ask():
                    began = trio.current_time()
                    with pytest.raises(ServerBusyError) as caught:
                        await it.ids(prompt_of(6), max_tokens=5)
                    reasons.append((caught.value.reason, round(trio.current_time() - began)))

                nursery.start_soon(ask)
                nursery.start_soon(ask)
            assert sorted(reasons) == [("queue_full", 0), ("timeout", 2)]


@pytest.mark.failure(33)
@pytest.mark.trio
async def test_the_surplus_over_the_prefill_queue_is_refused_at_once(cluster, autojump_clock):
    limits = {"prefill_queue_tokens": 10000, "sim_prefill_tokens_per_s": 20000.0}
    async with cluster(
        prefill=limits, decode={"admission_timeout": 100.0, "admission_queue_size": 500}, admission_timeout=100.0
    ) as it:
        outcomes = []

        async def ask(i: int) -> None:
            began = trio.current_time()
            try:
                outcomes.append(len(await it.ids(prompt_of(1000, salt=i), max_tokens=2)))
            except ServerBusyError as error:
                assert trio.current_time() - began < 0.1
                outcomes.append(error.reason)

        async with trio.open_nursery() as nursery:
            for i in range(200):
                nursery.start_soon(ask, i)
        assert outcomes.count("prefill_queue_full") == 190
        assert outcomes.count(2) == 10


@pytest.mark.failure(32)
@pytest.mark.trio
async def test_the_same_label_twice_at_once_is_two_requests(cluster, autojump_clock):
    async with cluster() as it:
        results = {}

        async def ask(salt: int) -> None:
            results[salt] = await it.ids(prompt_of(30, salt), label="same", max_tokens=12)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 1)
            nursery.start_soon(ask, 2)
        for salt, ids in results.items():
            assert ids == expected_tokens(prompt_of(30, salt), SamplingParams(max_tokens=12, temperature=0.0))


@pytest.mark.trio
async def test_a_decode_node_lost_before_the_first_output_is_replaced_by_another(cluster, autojump_clock):
    async with cluster(prefill={"sim_prefill_tokens_per_s": 100.0}, decodes=2) as it:
        result = []

        async def ask():
            result.extend(await it.ids(prompt_of(50), max_tokens=5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.1)
            it.scopes["d0"].cancel()
            it.nodes = [node for node in it.nodes if node.node_id != "d0"]
        assert result == expected_tokens(prompt_of(50), SamplingParams(max_tokens=5, temperature=0.0))


@pytest.mark.trio
async def test_a_decode_node_lost_in_the_middle_is_one_error(cluster, autojump_clock):
    async with cluster() as it:
        with pytest.raises(WorkerFailedError, match="d0"):
            async with it.master.generate(it.request(prompt_of(5), max_tokens=4000)) as output:
                await output.__anext__()
                it.scopes["d0"].cancel()
                it.nodes.pop()
                async for _ in output:
                    pass
        await it.quiet()
        with pytest.raises(NoWorkersError, match="Decode"):
            await it.ids([65], max_tokens=1)


@pytest.mark.failure(27)
@pytest.mark.trio
async def test_a_newer_registration_outlives_the_clean_up_of_the_older(cluster, autojump_clock):
    async with cluster() as it:
        (old,) = it.registry.nodes("decode")
        it.nodes.pop()
        older = it.scopes["d0"]
        newer = await it.start(DecodeConfig(**BASE, node_id="d0"))
        older.cancel()  # its clean-up comes after the newer registration
        await trio.sleep(5)
        (current,) = it.registry.nodes("decode")
        assert current is not old
        assert len(await it.ids(prompt_of(20), max_tokens=5)) == 5
        newer.check_integrity()


@pytest.mark.trio
async def test_the_total_deadline_ends_a_request(cluster, autojump_clock):
    async with cluster(request_timeout=1.0) as it:
        began = trio.current_time()
        with pytest.raises(DeadlineExceededError):
            await it.ids(prompt_of(5), max_tokens=4000)
        assert trio.current_time() - began == pytest.approx(1.0, abs=0.05)


@pytest.mark.trio
async def test_a_newer_decode_node_serves_and_one_without_admission_is_refused_and_named(cluster, autojump_clock):
    async with cluster(decode={"faults": "protocol-bump"}) as it:
        assert len(await it.ids(prompt_of(20), max_tokens=5)) == 5
        with pytest.raises(trio.TooSlowError):
            await it.start(DecodeConfig(**BASE, node_id="old", disable_admission=True))
        it.nodes.pop()
        assert any("old" in reason and "decode_admission" in reason for reason in it.master.readiness().reasons)


@pytest.mark.failure(1)
@pytest.mark.trio
async def test_a_client_that_leaves_between_prefill_and_decode_fifty_times(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 1}) as it:
        async with it.master.generate(it.request(prompt_of(5), max_tokens=4000)) as running:
            await running.__anext__()
            for i in range(50):
                with trio.move_on_after(0.1):
                    await it.ids(prompt_of(200, salt=i), max_tokens=5)
        await it.quiet()


@pytest.mark.trio
async def test_a_draining_node_takes_nothing_new_and_finishes_what_it_has(cluster, autojump_clock):
    async with cluster() as it:
        decode = it.nodes[1]
        async with it.master.generate(it.request(prompt_of(5), max_tokens=50)) as output:
            await output.__anext__()
            it.nursery.start_soon(decode.drain)
            await trio.sleep(0.01)
            assert not it.master.readiness().ready
            with pytest.raises((NoWorkersError, ServerBusyError)):
                await it.ids([65], max_tokens=1)
            rest = [token async for delta in output for token in delta.token_ids]
        assert len(rest) >= 45
