"""n > 1: one prefill, one reservation, one transfer; each choice its own sequence, slot and end."""

from __future__ import annotations

import pytest
import trio

from pdserve.engine.sim import expected_tokens
from pdserve.errors import InvalidRequestError, ServerBusyError, WorkerFailedError
from pdserve.text.bytelevel import ByteTokenizer
from pdserve.wire.codec import encode
from pdserve.wire.messages import Cancel, Decode, Reserve, SamplingParams

pytestmark = pytest.mark.trio

EOS = ByteTokenizer().eos_token_ids
STEP = 0.005
SAMPLED = {"temperature": 1.0, "seed": 11}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 13) % 200 + 20 for i in range(length)]


def expected(prompt: list[int], n: int, max_tokens: int, **params) -> dict[int, list[int]]:
    sampling = SamplingParams(max_tokens=max_tokens, **{**SAMPLED, **params})
    return {choice: expected_tokens(prompt, sampling, choice, EOS, vocab_size=258) for choice in range(n)}


async def leave_after(it, prompt, seconds: float, n: int) -> None:
    with trio.move_on_after(seconds):
        await it.choices(prompt, n, max_tokens=10, **SAMPLED)


@pytest.mark.parametrize("faults", ["", "omit-first-token"])
async def test_each_choice_is_its_own_reproducible_output_around_every_page_border(faults, cluster, autojump_clock):
    async with cluster(prefill={"faults": faults}) as it:
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 40):
            prompt = prompt_of(length, salt=length)
            want = expected(prompt, 4, 24)
            assert len({tuple(ids) for ids in want.values()}) > 1
            for temperature in ("cold", "cached"):
                found = await it.choices(prompt, 4, max_tokens=24, **SAMPLED)
                assert found == want, (length, temperature)
                await it.quiet()


async def test_choices_come_interleaved(cluster, autojump_clock):
    async with cluster() as it:
        order = []
        async with it.master.generate(it.request(prompt_of(20), n=3, max_tokens=20, **SAMPLED)) as output:
            async for delta in output:
                order.append(delta.choice)
        last_of_first = max(i for i, choice in enumerate(order) if choice == 0)
        assert sum(choice != 0 for choice in order[:last_of_first]) > 10


@pytest.mark.failure(17)
async def test_the_prompt_is_computed_and_pulled_once_and_its_full_pages_are_shared(cluster, autojump_clock):
    async with cluster(prefill={"sim_prefill_tokens_per_s": 1000.0}) as it:
        decode, prompt = it.node("d0"), prompt_of(16 * 10 + 5)
        async with it.master.generate(it.request(prompt, n=4, max_tokens=40, **SAMPLED)) as output:
            began = trio.current_time()
            await anext(output)
            assert trio.current_time() - began == pytest.approx(len(prompt) / 1000, abs=0.02)
            while decode.scheduler.running < 4:
                await trio.sleep(STEP)
            # ten shared pages, then three own ones for each: the partial page and 40 tokens of output
            assert decode.cache.counts().pinned == 10 + 4 * 3
            assert decode.owner.stats().running == 0
        assert b'pdserve_transfers_total{outcome="done"} 1.0' in decode.metrics.render()


async def test_three_choices_with_room_for_two_wait_and_then_run(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 3}) as it:
        async with it.master.generate(it.request(prompt_of(10), max_tokens=40)) as running:
            await anext(running)
            async with trio.open_nursery() as nursery:
                found = {}

                async def ask():
                    found.update(await it.choices(prompt_of(12), 3, max_tokens=5, **SAMPLED))

                nursery.start_soon(ask)
                await trio.sleep(STEP * 10)
                assert not found
                assert it.node("d0").role.stats().queued == 3
                async for _ in running:
                    pass
            assert found == expected(prompt_of(12), 3, 5)


@pytest.mark.parametrize("faults", ["", "transfer-delay=0.02"])
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(faults, cluster, autojump_clock):
    async with cluster(decode={"faults": faults}, prefill={"sim_prefill_tokens_per_s": 2000.0}) as it:
        for millis in range(60):
            await leave_after(it, prompt_of(37, salt=millis), millis / 1000, 3)
            await it.quiet(within=0.1)
        assert await it.choices(prompt_of(37), 3, max_tokens=10, **SAMPLED) == expected(prompt_of(37), 3, 10)


def hold_back_claims(it) -> list[Decode]:
    """Decode frames are kept instead of sent, from now on; the list of them."""
    node, kept = it.registry.nodes("decode")[0], []
    send = node.send
    node.send = lambda frame: kept.append(frame) if isinstance(frame, Decode) else send(frame)
    return kept


async def wait_reserved(it, slots: int) -> None:
    with trio.fail_after(5):
        while it.node("d0").role.stats().reserved != slots:
            await trio.sleep(0.001)


async def test_a_client_that_leaves_while_its_slots_are_reserved_gives_them_back(cluster, autojump_clock):
    async with cluster() as it:
        hold_back_claims(it)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_after, it, prompt_of(10), 1.0, 3)
            await wait_reserved(it, 3)
            assert it.node("d0").role.stats().active == 3
        await it.quiet(within=0.1)
        assert b'pdserve_reservations_total{outcome="cancelled"} 1.0' in it.node("d0").metrics.render()


async def test_an_unclaimed_reservation_expires_after_its_time_to_live_from_the_grant(cluster, autojump_clock):
    async with cluster(reservation_ttl=2.0) as it:
        hold_back_claims(it)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_after, it, prompt_of(10), 10.0, 3)
            await wait_reserved(it, 3)
            began = trio.current_time()
            await wait_reserved(it, 0)
            assert trio.current_time() - began == pytest.approx(2.0, abs=0.05)
            stats = it.node("d0").role.stats()
            assert (stats.active, stats.queued) == (0, 0)
            nursery.cancel_scope.cancel()
        assert b'pdserve_reservations_total{outcome="expired"} 1.0' in it.node("d0").metrics.render()


async def test_a_claim_after_expiry_is_refused_and_the_whole_group_is_busy(cluster, autojump_clock):
    async with cluster(reservation_ttl=1.0) as it:
        kept = hold_back_claims(it)
        outcome = []

        async def ask():
            with pytest.raises(ServerBusyError) as caught:
                await it.choices(prompt_of(10), 3, max_tokens=5)
            outcome.append(caught.value.reason)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_reserved(it, 3)
            await trio.sleep(1.1)
            assert not outcome
            for frame in list(kept):
                it.node("d0").role.accept_decode(frame, it.node("d0").links[0]._requests)
        assert outcome == ["expired"]
        assert it.node("d0").role.stats().active == 0


async def test_the_first_claim_commits_the_group_and_stops_its_time_to_live(cluster, autojump_clock):
    async with cluster(reservation_ttl=1.0) as it:
        kept = hold_back_claims(it)
        found = {}

        async def ask():
            found.update(await it.choices(prompt_of(10), 3, max_tokens=5, **SAMPLED))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_reserved(it, 3)
            node = it.node("d0")
            node.role.accept_decode(kept[0], node.links[0]._requests)
            await trio.sleep(5)
            assert node.role.stats().active == 2, "the claimed choice is over, the others are still theirs"
            for frame in kept[1:3]:
                node.role.accept_decode(frame, node.links[0]._requests)
        assert found == expected(prompt_of(10), 3, 5)


async def test_a_link_lost_between_grant_and_claim_gives_the_slots_back_at_once(cluster, autojump_clock):
    async with cluster(retry=False) as it:
        hold_back_claims(it)
        errors = []

        async def ask():
            with pytest.raises(WorkerFailedError):
                await it.choices(prompt_of(10), 3)
            errors.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_reserved(it, 3)
            it.cut("d0")
            await it.quiet(within=0.1)
        assert len(errors) == 1


async def test_one_choice_that_fails_after_the_commit_leaves_the_others_alone(cluster, autojump_clock):
    async with cluster(decode={"faults": "fail-choice=1"}) as it:
        found = await it.choices(prompt_of(20), 3, max_tokens=12, **SAMPLED)
        want = expected(prompt_of(20), 3, 12)
        assert (found[0], found[2]) == (want[0], want[2])
        assert isinstance(found[1].error, WorkerFailedError)


@pytest.mark.failure(17)
@pytest.mark.parametrize("choice", [0, 1, 2])
async def test_one_choice_cancelled_in_the_transfer_costs_the_others_nothing(choice, cluster, autojump_clock):
    async with cluster(decode={"faults": "transfer-delay=0.5"}) as it:
        node, found = it.node("d0"), {}
        async with it.master.generate(it.request(prompt_of(37), n=3, max_tokens=12, **SAMPLED)) as output:
            first = [await anext(output) for _ in range(3)]
            assert sorted(delta.choice for delta in first) == [0, 1, 2]
            node.links[0]._on_message(encode(Cancel(first[0].id, 1, choice)))
            await trio.sleep(0.1)
            assert (node.role.stats().active, node.slots.used, node.owner.stats().running) == (2, 2, 1)
            for delta in first:
                found.setdefault(delta.choice, []).extend(delta.token_ids)
            others = {0, 1, 2} - {choice}
            while others:
                delta = await anext(output)
                found[delta.choice].extend(delta.token_ids)
                if delta.finish is not None:
                    others.remove(delta.choice)
        want = expected(prompt_of(37), 3, 12)
        assert {i: ids for i, ids in found.items() if i != choice} == {i: want[i] for i in want if i != choice}


async def test_choices_that_are_all_cancelled_end_the_transfer_too(cluster, autojump_clock):
    async with cluster(decode={"faults": "transfer-delay=0.5"}) as it:
        node = it.node("d0")
        async with it.master.generate(it.request(prompt_of(37), n=3, max_tokens=12, **SAMPLED)) as output:
            first = [await anext(output) for _ in range(3)]
            for choice in range(3):
                node.links[0]._on_message(encode(Cancel(first[0].id, 1, choice)))
            await trio.sleep(0.01)
            assert (node.role.stats().active, node.slots.used) == (0, 0)
            assert node.role.idle


@pytest.mark.parametrize("max_tokens", [1, 30])
async def test_a_failed_transfer_is_one_error_of_the_whole_request(max_tokens, cluster, autojump_clock):
    async with cluster(decode={"faults": "transfer-fail=1"}) as it:
        if max_tokens == 1:  # all choices end with the first token: nothing is pulled
            found = await it.choices(prompt_of(20), 3, max_tokens=1, **SAMPLED)
            assert found == expected(prompt_of(20), 3, 1)
        else:
            with pytest.raises(WorkerFailedError, match="KV transfer"):
                await it.choices(prompt_of(20), 3, max_tokens=max_tokens, **SAMPLED)


@pytest.mark.failure(17)
async def test_more_choices_than_any_node_has_slots_are_invalid_and_reach_nobody(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 2}) as it:
        with pytest.raises(InvalidRequestError, match="at most 2") as caught:
            await it.choices(prompt_of(10), 3)
        assert caught.value.param == "n"
        assert it.node("p0").scheduler.idle


async def test_a_group_too_large_for_the_free_part_of_the_queue_is_busy_at_once(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 3, "admission_queue_size": 2}) as it:
        async with it.master.generate(it.request(prompt_of(10), max_tokens=400)) as running:
            await anext(running)
            began = trio.current_time()
            with pytest.raises(ServerBusyError) as caught:
                await it.choices(prompt_of(12), 3)
            assert caught.value.reason == "queue_full"
            assert trio.current_time() - began < 0.05


async def test_without_admission_the_choices_go_out_unreserved_and_start_together_or_not_at_all(
    cluster, autojump_clock
):
    async with cluster(decode={"disable_admission": True, "max_running_requests": 3}, disable_admission=True) as it:
        node, sent = it.registry.nodes("decode")[0], []
        send = node.send
        node.send = lambda frame: (sent.append(frame), send(frame))
        found = {}
        async with it.master.generate(it.request(prompt_of(10), max_tokens=40)) as running:
            await anext(running)

            async def ask():
                found.update(await it.choices(prompt_of(12), 3, max_tokens=5, **SAMPLED))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.sleep(10 * STEP)
                assert it.node("d0").slots.used == 1, "no index is taken before all three are free"
                assert it.node("d0").role.stats().queued == 3
                async for _ in running:
                    pass
        assert found == expected(prompt_of(12), 3, 5)
        assert not [frame for frame in sent if isinstance(frame, Reserve)]


async def test_a_prompt_is_held_on_prefill_until_the_last_choice_has_what_it_needs(cluster, autojump_clock):
    decode = {"max_running_requests": 3, "admission_timeout": 30.0}
    async with cluster(prefill={"hold_timeout": 3.0}, decode=decode, admission_timeout=30.0) as it:
        async with it.master.generate(it.request(prompt_of(10), max_tokens=2000)) as running:
            await anext(running)
            found = {}

            async def ask():
                found.update(await it.choices(prompt_of(40), 3, max_tokens=5, **SAMPLED))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.sleep(9)
                assert it.node("p0").owner.stats().holds == 1
                async for _ in running:
                    pass
        assert found == expected(prompt_of(40), 3, 5)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
async def test_the_output_room_is_all_that_fits_and_not_a_token_more(length, n, cluster, autojump_clock):
    async with cluster(decode={"kv_tokens": 16 * 30}) as it:
        room = it.master.output_room(length, n)
        found = await it.choices(prompt_of(length), n, max_tokens=room, **SAMPLED)
        assert sorted(found) == list(range(n))
        with pytest.raises(InvalidRequestError):
            await it.choices(prompt_of(length), n, max_tokens=room + 17)
