"""Nodes that die, hang, or are killed by a request: found in time, told once, and the others serve on."""

from __future__ import annotations

import pytest
import trio

from lifecycle.client import Client
from lifecycle.failing import (
    BEATS,
    INTERVAL,
    ask,
    body_of,
    bury,
    config,
    die,
    expected,
    fail_steps,
    front,
    outcome_of,
    prompt_of,
    registered,
    until,
)
from pdserve.engine.scheduler import Sequence
from pdserve.errors import TransferError
from pdserve.wire.messages import Decode, SamplingParams

pytestmark = pytest.mark.trio


def asked(it, node_id: str) -> list[Decode]:
    """Every `Decode` frame that reaches that node from now on."""
    role, frames = it.node(node_id).role, []
    accept = role.accept_decode
    role.accept_decode = lambda frame, link: (frames.append(frame), accept(frame, link))
    return frames


@pytest.mark.failure(4)
@pytest.mark.parametrize("noticed", [True, False])
async def test_after_a_restart_of_prefill_the_next_request_is_right(noticed, cluster, autojump_clock):
    """Same name, same address; also where the new life is there before the old one has been missed."""
    async with cluster(**BEATS) as it:
        prompt = prompt_of(100)
        for _ in range(4):
            assert (await ask(it, prompt, max_tokens=9)).ids == expected(prompt, 9)
            if noticed:
                die(it, "p0")
                await trio.sleep(0.1)
                assert registered(it, "p0") is None
            else:
                it.mute("p0")
                it.scopes["p0"].cancel()
                await until(lambda: len(it.nodes) == 1, 5)
            await it.start(config("p0"))
            began = trio.current_time()
            found = await ask(it, [*prompt, 65], max_tokens=9)
            assert (found.ids, found.done) == (expected([*prompt, 65], 9), True)
            assert trio.current_time() - began < 1.0
        await trio.sleep(1)
        assert it.node("d0").owner.stats().peers == 1, "nothing is left of the earlier lives"


@pytest.mark.failure(5)
@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("silent", [True, False])
async def test_a_dead_peers_transfer_resources_go_within_the_deadline(silent, reading, cluster, autojump_clock):
    """No other peer comes: the death alone is what frees them."""
    async with cluster(decode=BEATS, **BEATS) as it:
        p, d = it.node("p0"), it.node("d0")
        assert (await ask(it, prompt_of(40))).done
        answers = []

        async def run() -> None:
            answers.append(await ask(it, prompt_of(100, 1)))

        async with trio.open_nursery() as nursery:
            if reading:
                it.network.delay = 60.0
                nursery.start_soon(run)
                await trio.sleep(0.5)
            assert (d.owner.stats().peers, d.owner.stats().running) == (1, int(reading))
            began = trio.current_time()
            if silent:  # the machine is gone: nothing says so
                it.mute("p0")
                it.network.disconnect(p.owner.metadata.agent)
                it.nodes.remove(p)
            else:
                die(it, "p0")
            await until(lambda: d.owner.stats().peers == d.owner.stats().running == 0, 3 * INTERVAL + 0.2)
            if not silent:
                assert trio.current_time() - began < 0.2
        assert all(answer.failed for answer in answers)
        await it.quiet(within=0.1)
        it.scopes["p0"].cancel()


@pytest.mark.failure(6)
async def test_both_decode_nodes_lost_under_load_leave_prefill_usable_and_readiness_true(cluster, autojump_clock):
    async with cluster(decodes=2, decode={"admission_queue_size": 50}, admission_timeout=60.0) as it:
        await it.start(config("p1"))
        answers = []

        async def run(salt: int) -> None:
            answers.append((salt, await ask(it, prompt_of(60, salt), max_tokens=100)))

        async with trio.open_nursery() as nursery:
            for salt in range(24):
                nursery.start_soon(run, salt)
            await trio.sleep(0.25)
            assert it.master.readiness().ready
            die(it, "d0")
            die(it, "d1")
            await trio.sleep(0.1)
            readiness = it.master.readiness()
            assert not readiness.ready
            assert "no Decode node is registered" in readiness.reasons
        assert len(answers) == 24
        for salt, answer in answers:
            assert answer.failed
            assert answer.ids == expected(prompt_of(60, salt), 100)[: len(answer.ids)]
        await it.quiet(within=0.1)  # that is: nothing is held or computed on either P
        assert (await ask(it, prompt_of(60))).status == 503
        for name in ("d0", "d1"):
            await it.start(config(name))
        assert it.master.readiness().ready
        for salt in range(8):
            assert (await ask(it, prompt_of(60, salt))).ids == expected(prompt_of(60, salt), 5)


@pytest.mark.failure(15)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("failing", ["link of d0", "transfer", "engine of d0", "link of p0", "p0"])
async def test_when_one_leg_fails_the_other_is_cancelled_within_100_ms(failing, whole, cluster, autojump_clock):
    async with cluster(decode={"sim_decode_ms": 20.0}, retry=False) as it:
        it.network.delay = 0.7 if failing == "transfer" else 3.0
        if failing == "transfer":
            it.network.fail_next(TransferError("failed on purpose"))
        p, d = it.node("p0"), it.node("d0")
        client = Client(front(it), body_of(prompt_of(100), max_tokens=1000, stream=not whole))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            await trio.sleep(0.5)
            assert (p.owner.stats().holds, d.owner.stats().running, d.slots.used) == (1, 1, 1)
            assert whole or client.status == 200
            if failing == "transfer":
                await trio.sleep(0.2)
            elif failing == "engine of d0":
                fail_steps(it, "d0")
                d.loop.submit(Sequence("other", [65], 1, SamplingParams(max_tokens=1), choices=(0,), one_shot=True))
            elif failing == "p0":
                die(it, "p0")
            else:
                it.cut(failing[-2:])
            await trio.sleep(0.1)
            assert p not in it.nodes or p.owner.stats().holds == 0
            assert d not in it.nodes or (d.slots.used, d.role.pool.active, d.role.idle) == (0, 0, True)
            assert client.ended
        found = outcome_of(client)
        assert found.failed
        assert found.status == (502 if whole else 200)
        await it.quiet(within=4)
        await bury()


@pytest.mark.failure(15)
async def test_prefill_lost_while_decode_queues_takes_the_request_out_of_the_queue_within_100_ms(
    cluster, autojump_clock
):
    async with cluster(decode={"max_running_requests": 1}, retry=False) as it:
        async with it.master.generate(it.request(prompt_of(5), max_tokens=2000)) as running:
            await anext(running)
            client = Client(front(it), body_of(prompt_of(40), stream=False))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.run)
                await trio.sleep(0.5)
                assert it.node("d0").role.pool.queued == 1
                die(it, "p0")
                await trio.sleep(0.1)
                assert it.node("d0").role.pool.queued == 0
            assert outcome_of(client).status == 502
            assert outcome_of(client).failed


@pytest.mark.failure(24)
@pytest.mark.parametrize("where", ["when the prompt is computed", "when its pages are to be held"])
async def test_a_bug_in_prefill_is_a_prompt_error_decode_is_not_asked_and_prefill_serves_on(
    where, cluster, monkeypatch, autojump_clock
):
    async with cluster() as it:
        p, frames = it.node("p0"), asked(it, "d0")

        def raises(*_):
            raise KeyError("a bug")

        began = trio.current_time()
        with monkeypatch.context() as patch:
            patch.setattr(*((p.role._waits, "add") if "computed" in where else (p.owner, "hold")), raises)
            found = await ask(it, prompt_of(100), stream=False)
        assert (found.status, found.failed) == (502, True)
        assert trio.current_time() - began < 0.1
        assert frames == []
        await it.quiet(within=0.1)
        assert (await ask(it, prompt_of(100))).ids == expected(prompt_of(100), 5)


@pytest.mark.failure(24)
async def test_an_engine_that_raises_in_prefill_takes_its_node_and_another_serves(cluster, autojump_clock):
    async with cluster() as it:
        frames = asked(it, "d0")
        failed = fail_steps(it, "p0")
        began = trio.current_time()
        alone = await ask(it, prompt_of(100), stream=False)
        assert (alone.status, alone.failed, len(failed)) == (503, True, 1), "nobody is left to try it on"
        assert trio.current_time() - began < 0.5
        assert frames == []
        await it.start(config("p1"))
        await it.start(config("p2"))
        failed, salt = fail_steps(it, "p1"), 0
        while not failed:  # the choice between nodes that are alike is random
            salt += 1
            found = await ask(it, prompt_of(100, salt))
            assert (found.ids, found.done) == (expected(prompt_of(100, salt), 5), True)
        assert [frame.epoch for frame in frames] == [1] * (salt - 1) + [2], "asked once for each"
        assert (await ask(it, prompt_of(100))).ids == expected(prompt_of(100), 5)
        await bury()


@pytest.mark.failure(31)
async def test_a_hung_step_of_prefill_ends_its_node_in_time_and_the_request_moves(cluster, autojump_clock):
    async with cluster(prefill={"faults": "step-hang-after=1", "step_timeout": 2.0}) as it:
        assert (await ask(it, prompt_of(40))).done
        hung, answers = it.node("p0"), []
        it.dead.add(hung.incarnation)

        async def run() -> None:
            answers.append(await ask(it, prompt_of(40, 1), max_tokens=9))

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(0.1)
            await it.start(config("p1"))
        assert (answers[0].ids, answers[0].done) == (expected(prompt_of(40, 1), 9), True)
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.3)
        await bury()
        assert hung not in it.nodes


@pytest.mark.failure(31)
async def test_a_hung_step_of_decode_ends_its_node_in_time_and_the_stream_with_an_error(cluster, autojump_clock):
    async with cluster(decode={"faults": "step-hang-after=10", "step_timeout": 2.0}) as it:
        hung = it.node("d0")
        it.dead.add(hung.incarnation)
        began = trio.current_time()
        found = await ask(it, prompt_of(40), max_tokens=100)
        assert found.failed
        assert found.ids == expected(prompt_of(40), 100)[: len(found.ids)]
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.3)
        await bury()
        assert hung not in it.nodes
        await it.start(config("d0"))
        assert (await ask(it, prompt_of(40))).ids == expected(prompt_of(40), 5)


POISON = 10
"""A token that no other prompt has."""


def poisonous(plan) -> bool:
    return any(POISON in sample.history for work in plan.work for sample in work.samples) or any(
        POISON in work.tokens for work in plan.work
    )


@pytest.mark.failure(34)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_poison_request_kills_two_nodes_at_most_and_is_a_502(role, whole, cluster, autojump_clock):
    """Decode computes the first token here: nothing has been said yet when its engine dies."""
    async with cluster(decodes=3, prefill={"faults": "omit-first-token"}) as it:
        for name in ("p1", "p2"):
            await it.start(config(name, faults="omit-first-token"))
        names = [node.node_id for node in it.nodes if node.role_name == role]
        failed = [fail_steps(it, name, poisonous) for name in names]
        found = await ask(it, [*prompt_of(40), POISON], max_tokens=9, stream=not whole)
        assert (found.status, found.failed, found.ids) == (502, True, [])
        assert sorted(map(len, failed)) == [0, 1, 1], "the third node never saw it"
        assert it.metrics.registry.get_sample_value("pdserve_retries_total", {"reason": "node_lost"}) == 1
        await it.quiet(within=0.1)
        assert (await ask(it, prompt_of(40))).ids == expected(prompt_of(40), 5)
        await bury()


@pytest.mark.failure(34)
async def test_a_poison_request_that_has_begun_to_answer_kills_one_node_and_is_not_tried_again(cluster, autojump_clock):
    async with cluster(decodes=2) as it:
        failed = [fail_steps(it, name, poisonous) for name in ("d0", "d1")]
        prompt = [*prompt_of(40), POISON]
        found = await ask(it, prompt, max_tokens=9)
        assert (found.status, found.failed, found.ids) == (200, True, expected(prompt, 1))
        assert sorted(map(len, failed)) == [0, 1]
        assert (await ask(it, prompt_of(40))).ids == expected(prompt_of(40), 5)
        await bury()
