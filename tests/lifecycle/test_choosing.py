"""Which nodes a request is sent to, and what is left of its admission deadline there."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
import pytest
import trio

from lifecycle.cluster import BASE, Cluster
from pdserve.config import DecodeConfig, PrefillConfig
from pdserve.errors import InvalidRequestError, ServerBusyError, WorkerFailedError
from pdserve.wire.messages import Busy, Decode, FirstToken, Reserve, SamplingParams

pytestmark = pytest.mark.trio


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 13) % 200 + 20 for i in range(length)]


@asynccontextmanager
async def of(*nodes: dict, **master):
    """A cluster of these nodes; the role is the first letter of the id."""
    async with trio.open_nursery() as nursery:
        it = Cluster(nursery, **master)
        for node in nodes:
            kind = PrefillConfig if node["node_id"].startswith("p") else DecodeConfig
            await it.start(kind(**{**BASE, **node}))
        yield it
        await it.quiet()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_goes_to_the_node_that_has_the_pages(n, autojump_clock):
    small, big = {"node_id": "d small", "kv_tokens": 128}, {"node_id": "d big", "kv_tokens": 1024}
    async with of({"node_id": "p0"}, small, big) as it:
        for salt in range(10):
            assert len(await it.choices(prompt_of(30, salt), n, max_tokens=120)) == n
        assert len(await it.choices(prompt_of(30), n, max_tokens=it.master.output_room(30, n))) == n
        with pytest.raises(InvalidRequestError, match="KV pages") as caught:
            await it.choices(prompt_of(30), n, max_tokens=2000)
        assert caught.value.param == "max_tokens"
        assert it.node("d small").metrics.registry.get_sample_value("pdserve_admission_wait_seconds_count") == 0


async def test_prefill_is_chosen_among_those_whose_decode_nodes_have_the_slots(autojump_clock):
    nodes = [
        {"node_id": f"{role}{size}", "page_size": size, "max_running_requests": slots}
        for role in "pd"
        for size, slots in ((16, 2), (32, 4))
    ]
    async with of(*nodes) as it:
        for salt in range(20):
            assert len(await it.choices(prompt_of(30, salt), 3, max_tokens=5)) == 3
        assert len(await it.choices(prompt_of(30), 2, max_tokens=5)) == 2


async def test_a_prompt_goes_to_a_prefill_node_that_has_the_pages_for_it(autojump_clock):
    nodes = [{"node_id": "p small", "kv_tokens": 160}, {"node_id": "p big"}, {"node_id": "d0"}]
    async with of(*nodes) as it:
        for salt in range(10):
            assert len(await it.ids(prompt_of(300, salt), max_tokens=5)) == 5


@pytest.mark.parametrize("n", [1, 3])
async def test_a_prompt_that_no_prefill_node_can_hold_is_the_clients_failure(n, autojump_clock):
    async with of({"node_id": "p0", "kv_tokens": 160}, {"node_id": "d0"}) as it:
        with pytest.raises(InvalidRequestError, match="prompt cannot be served") as caught:
            await it.choices(prompt_of(300), n, max_tokens=5)
        assert caught.value.param == "prompt"


async def test_a_full_prefill_queue_is_passed_over_for_another_node_even_where_the_prefix_is_cached(autojump_clock):
    slow = {"prefill_queue_tokens": 1000, "sim_prefill_tokens_per_s": 500.0}
    async with of({"node_id": "p0", **slow}, {"node_id": "p1", **slow}, {"node_id": "d0"}) as it:
        await it.ids(prompt_of(900), max_tokens=3)
        cached, other = sorted(it.nodes[:2], key=lambda node: node.cache.counts().cached, reverse=True)
        async with trio.open_nursery() as nursery:
            nobody_else = next(node for node in it.registry.nodes() if node.node_id == other.node_id)
            nobody_else.stats = msgspec.structs.replace(nobody_else.stats, draining=True)
            nursery.start_soon(partial(it.ids, prompt_of(700, 1), max_tokens=3))
            await trio.sleep(0.01)
            nobody_else.stats = other.role.stats()
            nursery.start_soon(partial(it.ids, prompt_of(900), max_tokens=3))
            await trio.sleep(0.1)
            assert (cached.role.stats().active, other.role.stats().active) == (1, 1)
            with pytest.raises(ServerBusyError) as caught:
                await it.ids(prompt_of(900), max_tokens=3)
            assert caught.value.reason == "prefill_queue_full"


async def test_the_admission_deadline_counts_once_over_a_retry(autojump_clock):
    decode = {"max_running_requests": 2, "admission_queue_size": 16, "kv_tokens": 65536}
    nodes = [{"node_id": "p0"}, {"node_id": "d0", **decode}, {"node_id": "d1", **decode}]
    async with of(*nodes, admission_timeout=5.0) as it, trio.open_nursery() as running:

        async def ask():
            began = trio.current_time()
            with pytest.raises(ServerBusyError):
                await it.choices(prompt_of(12), 2, max_tokens=3)
            return trio.current_time() - began

        async def lose_the_node_that_it_waits_for():
            await trio.sleep(4)
            it.cut(next(node for node in it.nodes[1:] if node.role.stats().queued).node_id)

        scopes = []
        for salt in range(4):

            async def run(salt=salt):
                with trio.CancelScope() as scope:
                    scopes.append(scope)
                    with suppress(WorkerFailedError):
                        await it.ids(prompt_of(10, salt), max_tokens=3500)

            running.start_soon(run)
            await trio.sleep(0.05)
        assert all(node.role.stats().active == 2 for node in it.nodes[1:])
        running.start_soon(lose_the_node_that_it_waits_for)
        assert await ask() == pytest.approx(5.0, abs=0.3)
        for scope in scopes:
            scope.cancel()


@pytest.mark.parametrize("queue", [-1, 0])
async def test_without_waiting_a_full_node_sends_the_request_to_the_other(queue, cluster, autojump_clock):
    decode = {"admission_timeout": 0.0, "admission_queue_size": queue}
    async with cluster(decodes=2, decode=decode, admission_timeout=0.0) as it:
        async with it.master.generate(it.request(prompt_of(10), n=4, max_tokens=200)) as running:
            await anext(running)
            for node in it.registry.nodes("decode"):
                full = it.node(node.node_id).role.stats().active == 4
                # what the Master knows while the newest report is on its way
                node.stats = msgspec.structs.replace(node.stats, active=0 if full else 1)
            assert len(await it.choices(prompt_of(20), 3, max_tokens=5)) == 3


async def test_a_group_that_is_refused_at_once_holds_up_nobody(two_masters, autojump_clock):
    async with two_masters(decode={"admission_timeout": 0.0}) as (first, _):
        node = first.node("d0")
        links = [link._requests for link in node.links]
        async with first.master.generate(first.request(prompt_of(10), max_tokens=3000)) as running:
            await anext(running)
            busy = []
            for link in links:
                link.send = lambda frame, send=link.send: (
                    busy.append(frame.id) if isinstance(frame, Busy) else send(frame)
                )
            eos = FirstToken(min(node.loop.engine.eos_token_ids))
            for i in range(50):
                node.role.accept_reserve(Reserve(f"group {i}", 1, 4, 10, 1, 1.0), links[0])
                single = Decode(f"single {i}", 1, (65,), SamplingParams(max_tokens=1), b"", eos)
                node.role.accept_decode(single, links[1])
                await trio.sleep(0.1)
            assert busy == [f"group {i}" for i in range(50)]


async def test_what_one_master_says_never_concerns_a_request_of_another(two_masters, autojump_clock):
    async with two_masters() as (first, _):
        node = first.node("d0")
        mine, other = (link._requests for link in node.links)
        answers = []
        other.send = lambda frame: answers.append(frame)
        node.role.accept_reserve(Reserve("r", 1, 2, 1, 1, 5.0), mine)
        await trio.sleep(0.1)
        claim = Decode("r", 1, (65,), SamplingParams(max_tokens=1), b"", None, 0, n=2, reserved=True)
        node.role.accept_decode(claim, other)
        assert [frame.reason for frame in answers] == ["expired"]
        assert node.role.stats().reserved == 2
        mine.cancel("r", 1)
