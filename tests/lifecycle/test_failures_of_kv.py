"""KV that is late, stale, used twice, or that nobody fetches: never other data, never a page too few afterwards."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
import trio

from lifecycle.client import Client
from lifecycle.cluster import BASE
from lifecycle.failing import ask, body_of, change, die, expected, front, outcome_of, prompt_of, watch
from pdserve.config import PrefillConfig
from pdserve.wire.messages import Decode, Delta, Failed, Prefill, Release, Renew, SamplingParams

pytestmark = pytest.mark.trio


def all_free(node) -> bool:
    return node.cache.available == node.cache.num_pages and node.owner.stats().holds == 0


@pytest.mark.failure(1)
async def test_a_client_that_leaves_before_decode_is_asked_leaves_prefill_full_fifty_times(cluster, autojump_clock):
    async with cluster() as it:
        p = it.node("p0")
        change(it, "d0", lambda frame: None if isinstance(frame, Decode) else frame)
        for i in range(50):
            async with it.master.generate(it.request(prompt_of(200, i), max_tokens=5)):
                with trio.fail_after(5):
                    while p.owner.stats().holds != 1:
                        await trio.sleep(0.001)
            await it.quiet(within=0.01)
            assert all_free(p)


@pytest.mark.failure(3)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("digest", [True, False], ids=["digest", "no digest"])
@pytest.mark.parametrize("stale", ["consumed", "released", "of an earlier life", "of another length"])
async def test_a_stale_handle_is_an_error_and_never_another_prompts_answer(
    stale, digest, whole, cluster, autojump_clock
):
    """Where a handle does not tell its prompt, like those of older nodes, the confirmation by Prefill finds it."""
    async with cluster() as it:
        kept: list[Decode] = []

        def replay(frame):
            if isinstance(frame, Decode):
                kept.append(frame)
                if len(kept) == 2:
                    handle = msgspec.msgpack.decode(kept[0].handle)
                    handle[6] = handle[6] if digest else 0
                    return msgspec.structs.replace(frame, handle=msgspec.msgpack.encode(handle))
            return frame

        change(it, "d0", replay)
        first = prompt_of(33 if stale == "of another length" else 40, 1)
        # One token needs no transfer: its hold is released, not pulled.
        answer = await ask(it, first, max_tokens=1 if stale == "released" else 8)
        assert answer.ids == expected(first, 8)[: len(answer.ids)]
        if stale == "of an earlier life":
            die(it, "p0")
            await trio.sleep(0.1)
            await it.start(PrefillConfig(**BASE, node_id="p0"))
        victim = await ask(it, prompt_of(40, 2), max_tokens=8, stream=not whole)
        assert victim.failed
        assert victim.errors[0]["code"] == "worker_failed"
        assert "KV transfer" in victim.errors[0]["message"]
        assert (victim.status, victim.ids) == ((502, []) if whole else (200, expected(prompt_of(40, 2), 8)[:1]))
        again = await ask(it, prompt_of(40, 2), max_tokens=8)
        assert (again.ids, again.done) == (expected(prompt_of(40, 2), 8), True)


@pytest.mark.failure(3)
async def test_a_living_handle_of_another_prompt_is_refused_by_decode(cluster, autojump_clock):
    async with cluster() as it:
        kept: list[Decode] = []

        def swap(frame):
            if isinstance(frame, Decode):
                kept.append(frame)
                return msgspec.structs.replace(frame, handle=kept[0].handle) if len(kept) == 2 else frame
            return frame

        change(it, "d0", swap)
        it.network.delay = 1.0  # the first READ runs, so its hold lives
        answers = []

        async def run(salt):
            answers.append(await ask(it, prompt_of(40, salt), max_tokens=8))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, 1)
            await trio.sleep(0.5)
            nursery.start_soon(run, 2)
        victim, first = answers
        assert "another prompt" in victim.errors[0]["message"]
        assert (first.ids, first.done) == (expected(prompt_of(40, 1), 8), True)


@pytest.mark.failure(7)
async def test_ids_that_differ_between_prefill_and_decode_release_the_right_pages(cluster, autojump_clock):
    """Decode knows two requests by each other's ids; the transfer ends a hold, whatever its request is called."""
    async with cluster() as it:
        p, waiting = it.node("p0"), []
        change(it, "d0", lambda frame: waiting.append(frame) if isinstance(frame, Decode) else frame)
        change(it, "p0", lambda frame: None if isinstance(frame, Release) else frame)
        prompts, answers = [prompt_of(40, 1), prompt_of(100, 2)], {}

        async def run(which: int) -> None:
            answers[which] = await it.ids(prompts[which], max_tokens=9)

        async with trio.open_nursery() as nursery:
            for which in (0, 1):
                nursery.start_soon(run, which)
                with trio.fail_after(5):
                    while len(waiting) == which:
                        await trio.sleep(0.001)
            short, long = waiting
            other, route = {short.id: long.id, long.id: short.id}, it.links._route
            it.links._route = lambda node, frame: route(
                node, frame if node.node_id == "p0" else msgspec.structs.replace(frame, id=other[frame.id])
            )
            d, link = it.node("d0"), it.node("d0").links[0]._requests
            assert p.cache.counts().pinned == 3 + 7
            d.role.accept_decode(msgspec.structs.replace(short, id=long.id), link)
            await trio.sleep(0.5)
            assert answers == {0: expected(prompts[0], 9)}
            assert p.cache.counts().pinned == 7, "the pages of the long prompt are left"
            d.role.accept_decode(msgspec.structs.replace(long, id=short.id), link)
        assert answers[1] == expected(prompts[1], 9)
        await it.quiet(within=0.1)
        assert all_free(p)


@pytest.mark.failure(13)
@pytest.mark.failure(23)
@pytest.mark.failure(33)
async def test_prompts_that_nobody_asks_decode_for_are_bounded_in_memory_and_in_time(cluster, autojump_clock):
    """A Master that goes quiet after `Prefill`: not a frame comes that could wake anything."""
    async with cluster(prefill={"kv_tokens": 640, "hold_timeout": 3.0}) as it:
        p, link = it.node("p0"), it.node("p0").links[0]._requests
        for i in range(20):
            frame = Prefill(f"lost-{i}", 1, tuple(prompt_of(64, i)), SamplingParams(max_tokens=5))
            p.role.accept_prefill(frame, link)
        began, most = trio.current_time(), 0
        while p.role.stats().active:
            most = max(most, p.cache.counts().pinned)
            await trio.sleep(0.01)
        assert most == 20, "half of the pool: five prompts of four pages"
        assert trio.current_time() - began == pytest.approx(4 * 3.0, abs=0.5)
        assert p.metrics.registry.get_sample_value("pdserve_transfers_total", {"outcome": "hold_expired"}) == 20
        assert all_free(p)
        assert (await ask(it, prompt_of(64, 99))).ids == expected(prompt_of(64, 99), 5)


@pytest.mark.failure(14)
async def test_a_transfer_key_used_twice_serves_one_and_is_refused_to_the_other(cluster, autojump_clock):
    async with cluster(decodes=2) as it:
        it.network.delay = 2.0
        seen, sent = watch(it), []
        for name in ("d0", "d1"):
            change(it, name, lambda frame: (sent.append(frame), frame)[1])
        answers = []

        async def run() -> None:
            answers.append(await ask(it, prompt_of(40), max_tokens=8))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(0.5)
            (frame,) = [frame for frame in sent if isinstance(frame, Decode)]
            (idle,) = [node for node in it.nodes[1:] if not node.role.stats().active]
            idle.role.accept_decode(frame, idle.links[0]._requests)
        assert (answers[0].ids, answers[0].done) == (expected(prompt_of(40), 8), True)
        await trio.sleep(1)
        theirs = [frame for name, frame in seen if name == idle.node_id]
        (refusal,) = [frame for frame in theirs if isinstance(frame, Failed)]
        assert (refusal.code, "stale" in refusal.message) == ("transfer_failed", True)
        assert not [frame for frame in theirs if isinstance(frame, Delta) and frame.finish]
        it.network.delay = 0.0
        for salt in range(6):
            assert (await ask(it, prompt_of(40, salt))).ids == expected(prompt_of(40, salt), 5)


@pytest.mark.failure(19)
@pytest.mark.parametrize("end", ["client leaves", "deadline", "prefill lost"])
async def test_an_abort_in_the_transfer_is_never_a_finish(end, cluster, autojump_clock):
    limits = {"request_timeout": 1.0} if end == "deadline" else {}
    async with cluster(**limits) as it:
        it.network.delay = 3.0
        seen, client = watch(it), Client(front(it), body_of(prompt_of(40), max_tokens=2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            await trio.sleep(0.9)
            assert it.node("d0").owner.stats().running == 1
            if end == "client leaves":
                client.gone.set()
            elif end == "prefill lost":
                it.cut("p0")
        await trio.sleep(3)
        assert b'"length"' not in client.data
        assert not [frame for _, frame in seen if isinstance(frame, Delta) and frame.finish]
        found = outcome_of(client)
        assert (found.ids, found.finish, found.done) == (expected(prompt_of(40), 1), [], False)
        told = {"client leaves": [], "deadline": ["deadline_exceeded"], "prefill lost": ["worker_failed"]}[end]
        assert [error["code"] for error in found.errors] == told
        counted = {"client leaves": "client_gone", "deadline": "deadline", "prefill lost": "failed"}[end]
        labels = {"endpoint": "/v1/completions", "outcome": counted}
        assert it.metrics.registry.get_sample_value("pdserve_requests_total", labels) == 1
        d = it.node("d0").metrics.registry
        assert d.get_sample_value("pdserve_transfers_total", {"outcome": "done"}) in (0, None)
        assert d.get_sample_value("pdserve_transfers_total", {"outcome": "failed"}) == 1


@pytest.mark.failure(22)
async def test_pages_that_wait_for_their_transfer_are_not_evicted_by_other_prompts(cluster, autojump_clock):
    async with cluster(prefill={"kv_tokens": 160, "hold_share": 1.0}) as it:
        it.network.delay = 3.0
        p, prompt, answers = it.node("p0"), prompt_of(100, 1), []

        async def run() -> None:
            answers.append(await ask(it, prompt, max_tokens=20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(0.5)
            (hold,) = p.owner._holds._holds.values()
            pages = msgspec.msgpack.decode(hold.handle)[4]
            before = p.loop.engine._kv[pages].copy()
            for salt in range(30):  # three pages each, of the three that are left
                assert (await ask(it, prompt_of(40, 100 + salt), max_tokens=1)).done
            assert not answers, "the READ has not ended yet"
            assert (p.loop.engine._kv[pages] == before).all()
        assert (answers[0].ids, answers[0].done) == (expected(prompt, 20), True)


@pytest.mark.failure(3)
@pytest.mark.failure(22)
@pytest.mark.parametrize("land_early", [False, True])
@pytest.mark.parametrize("second", [1.0, 4.0, 5.9], ids=["before expiry", "after the pages were reused", "at the end"])
async def test_a_hold_that_expires_during_its_read_is_refused_and_poisons_nobody(
    land_early, second, cluster, autojump_clock
):
    """The READ takes six seconds, the hold two, and nothing renews it: other KV lies in P's pages when they are read.
    Whoever shares the prefix meanwhile gets pages of its own."""
    async with cluster(prefill={"hold_timeout": 2.0, "kv_tokens": 224, "hold_share": 1.0}) as it:
        it.network.delay, it.network.land_early = 6.0, land_early
        p, prompt = it.node("p0"), prompt_of(100)
        sharing = [*prompt[:80], *prompt_of(20, 7)]
        answers, doomed = {}, []
        change(it, "p0", lambda frame: None if isinstance(frame, Renew) and frame.id in doomed else frame)

        async def run(name: str, at: float, tokens: list[int], max_tokens: int) -> None:
            await trio.sleep(at)
            answers[name] = await ask(it, tokens, max_tokens=max_tokens)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "doomed", 0.0, prompt, 20)
            await trio.sleep(0.2)
            doomed += [request["id"] for request in it.master.coordinator.snapshot()]
            (hold,) = p.owner._holds._holds.values()
            pages = list(msgspec.msgpack.decode(hold.handle)[4])
            before = p.loop.engine._kv[pages].copy()
            nursery.start_soon(run, "sharing", second - 0.2, sharing, 20)
            await trio.sleep(2.3)
            assert hold.ended
            for salt in range(3):  # all pages that are not held are written anew
                assert (await ask(it, prompt_of(100, 50 + salt), max_tokens=1)).done
            reused = (p.loop.engine._kv[pages] != before).any(axis=1)
            # Where the second prompt came before the expiry, it holds the pages of the common prefix.
            assert reused.sum() == (2 if second < 2.0 else 7)
        assert answers["doomed"].failed
        assert answers["doomed"].ids == expected(prompt, 20)[:1]
        assert "stale" in answers["doomed"].errors[0]["message"]
        assert (answers["sharing"].ids, answers["sharing"].done) == (expected(sharing, 20), True)
        it.network.delay = 0.0
        for tokens in (prompt, sharing, prompt[:81]):
            assert (await ask(it, tokens, max_tokens=20)).ids == expected(tokens, 20)


@pytest.mark.failure(2)
async def test_a_client_that_leaves_a_read_whose_hold_has_expired_leaves_its_pages_out_of_use(cluster, autojump_clock):
    async with cluster(prefill={"hold_timeout": 2.0}, decode={"kv_tokens": 320}) as it:
        it.network.delay = 6.0
        d, prompt = it.node("d0"), prompt_of(100)
        change(it, "p0", lambda frame: None if isinstance(frame, Renew) else frame)
        with trio.move_on_after(3):
            await it.ids(prompt, max_tokens=20)
        await trio.sleep(0.01)
        assert d.cache.counts().quarantined == 7
        it.network.delay = 0.0
        async with trio.open_nursery() as nursery:
            for salt in range(5):
                nursery.start_soon(partial(it.ids, prompt_of(60, salt), max_tokens=30))
            assert await it.ids(prompt, max_tokens=20) == expected(prompt, 20)
        assert d.cache.counts().quarantined == 7, "the READ has not ended yet"
        await trio.sleep(3.5)
        assert all_free(d)
