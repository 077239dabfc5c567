"""What clients do wrong, and what they must be told: their own failures stay theirs, and nothing waits for ever."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import pytest
import trio

import lifecycle.cluster
from lifecycle.client import Client
from lifecycle.cluster import BASE, CARD
from lifecycle.failing import ask, body_of, die, expected, front, outcome_of, prompt_of, registered
from pdserve.config import DecodeConfig, PrefillConfig
from pdserve.wire.messages import NodeStats

pytestmark = pytest.mark.trio

PATH = "/v1/completions"


def counted(it, name: str, **labels: str) -> float:
    return it.metrics.registry.get_sample_value(name, labels) or 0.0


def in_flight(it) -> float:
    return counted(it, "pdserve_requests_in_flight", endpoint=PATH)


class Slow(Client):
    """Notes when each event came. With `pause` the connection takes so many seconds for each, or until it is `cut`, and
    like the real server's send, this one cannot be cancelled meanwhile."""

    def __init__(self, app, body: dict, pause: float = 0.0) -> None:
        super().__init__(app, body)
        self.times: list[float] = []
        self.cut = trio.Event()
        self._pause = pause

    async def _send(self, message: dict) -> None:
        await super()._send(message)
        if message.get("body"):
            self.times.append(trio.current_time())
            with trio.move_on_after(self._pause, shield=True):
                await self.cut.wait()


@pytest.mark.failure(12)
@pytest.mark.parametrize("shorter", ["p1", "d1"])
async def test_limits_that_differ_are_reconciled_when_nodes_register(shorter, cluster, monkeypatch, autojump_clock):
    """The shortest one counts as long as its node is there; what is over it reaches no node."""
    async with cluster() as it:
        kind = PrefillConfig if shorter == "p1" else DecodeConfig
        with monkeypatch.context() as patch:
            patch.setattr(lifecycle.cluster, "CARD", msgspec.structs.replace(CARD, max_len=100))
            await it.start(kind(**BASE, node_id=shorter))
        assert it.master.card.max_len == 100
        for prompt, max_tokens in ((prompt_of(101), 1), (prompt_of(90), 11), (prompt_of(5000), 1)):
            for stream in (False, True):
                found = await ask(it, prompt, max_tokens=max_tokens, stream=stream)
                assert (found.status, found.failed) == (400, True)
                assert found.errors[0]["param"] in ("prompt", "max_tokens")
        assert [node.loop._steps for node in it.nodes] == [0, 0, 0], "no worker saw any of it"
        assert counted(it, "pdserve_requests_total", endpoint=PATH, outcome="invalid") == 6
        for salt in range(6):
            assert (await ask(it, prompt_of(90, salt), max_tokens=10)).ids == expected(prompt_of(90, salt), 10)
        die(it, shorter)
        await trio.sleep(0.1)
        assert (await ask(it, prompt_of(500), max_tokens=20)).ids == expected(prompt_of(500), 20)


@pytest.mark.failure(16)
async def test_what_is_the_clients_failure_is_no_nodes_failure(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 1, "admission_queue_size": 0}) as it:
        generations = [node.generation for node in it.registry.nodes()]
        async with it.master.generate(it.request(prompt_of(5), max_tokens=4000)) as running:
            await anext(running)
            for salt in range(20):
                assert (await ask(it, prompt_of(40, salt))).status == 429
                assert (await ask(it, [])).status == 400
                assert (await ask(it, prompt_of(40), n=2)).status == 400
                assert (await ask(it, prompt_of(40), max_tokens=5000)).status == 400
        assert [node.generation for node in it.registry.nodes()] == generations
        assert it.master.readiness().ready
        assert it.master.readiness().reasons == ()
        assert counted(it, "pdserve_retries_total", reason="node_lost") == 0
        assert counted(it, "pdserve_requests_total", endpoint=PATH, outcome="failed") == 0
        assert counted(it, "pdserve_requests_total", endpoint=PATH, outcome="busy") == 20
        await trio.sleep(0.1)
        for salt in range(4):  # the nodes are taken as before
            assert (await ask(it, prompt_of(40, salt))).ids == expected(prompt_of(40, salt), 5)


@pytest.mark.failure(18)
async def test_the_load_gauges_hold_until_a_slow_stream_has_ended(cluster, autojump_clock):
    async with cluster(decode={"sim_decode_ms": 3000.0}) as it:
        client = Client(front(it), body_of(prompt_of(40), max_tokens=10))

        def gauges() -> tuple[float, int, int, int]:
            d = registered(it, "d0")
            assert isinstance(d.stats, NodeStats)
            return in_flight(it), it.node("d0").role.stats().active, d.stats.active, len(d.mailboxes)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            await trio.sleep(2.5)
            while not client.ended:
                assert gauges() == (1, 1, 1, 1)
                await trio.sleep(1.0)
        assert (outcome_of(client).ids, outcome_of(client).done) == (expected(prompt_of(40), 10), True)
        await trio.sleep(0.1)
        assert gauges() == (0, 0, 0, 0)


@pytest.mark.failure(18)
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_request_counts_until_its_slow_reader_has_all_or_leaves(leaves, cluster, autojump_clock):
    async with cluster() as it:
        client = Slow(front(it), body_of(prompt_of(40), max_tokens=2000), pause=2.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            await trio.sleep(1.0)
            while not client.ended:
                assert in_flight(it) == 1
                if leaves and len(client.times) == 3:
                    client.gone.set()
                await trio.sleep(0.5)
        assert in_flight(it) == 0
        if not leaves:
            assert (outcome_of(client).ids, outcome_of(client).done) == (expected(prompt_of(40), 2000), True)
        outcome = "client_gone" if leaves else "ok"
        assert counted(it, "pdserve_requests_total", endpoint=PATH, outcome=outcome) == 1


@pytest.mark.failure(28)
async def test_a_reader_that_stops_loses_its_slot_in_time_and_no_other_stream_notices(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 2, "kv_tokens": 8192}) as it:
        app = front(it, slow_reader_timeout=4.0)
        stopped = Slow(app, body_of(prompt_of(40, 1), max_tokens=3000), pause=60.0)
        other = Slow(app, body_of(prompt_of(40, 2), max_tokens=1600))
        d = it.node("d0")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stopped.run)
            nursery.start_soon(other.run)
            await trio.sleep(3.9)
            assert d.slots.used == 2
            await trio.sleep(0.2)
            assert (d.slots.used, d.role.stats().active) == (1, 1), "the slot is free, though the send still hangs"
            assert not stopped.ended
            third = await ask(it, prompt_of(40, 3))
            assert (third.ids, third.done) == (expected(prompt_of(40, 3), 5), True)
            stopped.cut.set()
        assert (outcome_of(other).ids, outcome_of(other).done) == (expected(prompt_of(40, 2), 1600), True)
        gaps = [later - earlier for earlier, later in pairwise(other.times)]
        assert max(gaps) < 4 * 0.005
        assert b"[DONE]" not in stopped.data
        assert counted(it, "pdserve_requests_total", endpoint=PATH, outcome="client_gone") == 1


@pytest.mark.failure(21)
@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_stops_within_one_chunk_after_its_client_has_left(stream, cluster, autojump_clock):
    chunk = 100 / 1000.0
    async with cluster(prefill={"chunk_tokens": 100, "sim_prefill_tokens_per_s": 1000.0}) as it:
        p, client = it.node("p0"), Client(front(it), body_of(prompt_of(3000), stream=stream))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.run)
            await trio.sleep(4.5 * chunk)
            assert (p.loop._steps, p.scheduler.idle) == (5, False)
            client.gone.set()
            await it.quiet(within=chunk)
        assert p.loop._steps == 5
        began = trio.current_time()
        assert (await ask(it, prompt_of(50, 1), max_tokens=1)).done
        assert trio.current_time() - began < 1.5 * chunk
        assert p.loop._steps == 6


@pytest.mark.failure(23)
@pytest.mark.parametrize(
    ("waits_for", "status", "message"),
    [
        ("prefill", 504, "took over 3 s"),
        ("transfer", 502, "did not end within 3 s"),
        ("confirmation", 502, "did not confirm its pages within 3 s"),
        ("first token", 502, "no first token within 3 s"),
    ],
)
async def test_limits_of_time_hold_where_nothing_at_all_comes_in(waits_for, status, message, cluster, autojump_clock):
    """No heartbeat, no other request, no frame."""
    quiet = {"heartbeat_interval": 10_000.0}
    limits = {"transfer_timeout": 3.0, "confirm_timeout": 3.0, "first_token_timeout": 3.0}
    faults = "omit-first-token" if waits_for == "first token" else ""
    master = {"request_timeout": 3.0} if waits_for == "prefill" else {}
    steps = {"sim_prefill_tokens_per_s": 0.1} if waits_for == "first token" else {}
    async with cluster(
        prefill={"faults": faults, **quiet}, decode={**limits, **quiet, **steps}, **quiet, **master
    ) as it:
        if waits_for == "prefill":
            it.mute("p0")
        elif waits_for == "transfer":
            it.network.delay = 8.0
        elif waits_for == "confirmation":
            it.network.drop = lambda *_: True
        began = trio.current_time()
        found = await ask(it, prompt_of(40), stream=False)
        assert trio.current_time() - began == pytest.approx(3.0, abs=0.1)
        assert (found.status, found.failed) == (status, True)
        assert message in found.errors[0]["message"]
        await trio.sleep(7)  # a step or READ that has begun ends in its own time
        await it.quiet()


@pytest.mark.failure(25)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("why", ["lost", "draining"])
async def test_without_a_decode_node_it_is_503_and_not_429(why, stream, cluster, autojump_clock):
    async with cluster() as it:
        client = Client(front(it), body_of(prompt_of(40), stream=stream))
        if why == "lost":
            die(it, "d0")
        else:
            it.node("d0").role.draining = True
        await trio.sleep(0.1)
        await client.run()
        assert client.status == 503
        assert json.loads(client.data)["error"]["message"]
        assert outcome_of(client).failed
        assert counted(it, "pdserve_requests_total", endpoint=PATH, outcome="unavailable") == 1
