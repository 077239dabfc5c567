"""Admission as clients and Masters see it: routing, refusals, several Masters, nodes of another version."""

from __future__ import annotations

from contextlib import asynccontextmanager
from statistics import median

import msgspec
import pytest
import trio
import trio.testing
from trio_websocket import wrap_client_stream

from lifecycle.cluster import note_grants
from pdserve.config import DecodeConfig
from pdserve.errors import ServerBusyError, WorkerFailedError
from pdserve.wire.codec import decode_from_master, encode
from pdserve.wire.handshake import signed
from pdserve.wire.messages import Admitted, Busy, Decode, Delta, Hello, NodeStats, Reserve, SamplingParams

pytestmark = pytest.mark.trio

STEP = 0.005


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 13) % 200 + 20 for i in range(length)]


class Load:
    """Requests that run until they are told to stop."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.scopes: list[trio.CancelScope] = []

    async def add(self, it, salt: int = 0, max_tokens: int = 3000) -> None:
        async def run(task_status):
            with trio.CancelScope() as scope:
                async with it.master.generate(it.request(prompt_of(9, salt), max_tokens=max_tokens)) as output:
                    await anext(output)
                    self.scopes.append(scope)
                    task_status.started()
                    async for _ in output:
                        pass

        await self.nursery.start(run)

    def stop(self) -> None:
        for scope in self.scopes:
            scope.cancel()


@asynccontextmanager
async def load():
    async with trio.open_nursery() as nursery:
        it = Load(nursery)
        yield it
        it.stop()


BIG = {"kv_tokens": 65536}


def refused(it) -> dict[str, float]:
    """Refusals by reason, as the Master counts them."""
    samples = [s for metric in it.metrics.registry.collect() for s in metric.samples]
    return {s.labels["reason"]: s.value for s in samples if s.name == "pdserve_admission_refusals_total" and s.value}


async def test_with_one_of_two_decode_nodes_full_every_request_goes_to_the_other(cluster, autojump_clock):
    decode = {"max_running_requests": 2, "admission_queue_size": 4, **BIG}
    async with cluster(decodes=2, decode=decode) as it, load() as running:
        full = it.registry.nodes("decode")[0]
        for node in it.registry.nodes("decode")[1:]:
            node.stats = msgspec.structs.replace(node.stats, draining=True)
        await running.add(it, 1)
        await running.add(it, 2)
        await trio.sleep(3)  # a heartbeat says that the other does not drain
        for salt in range(2):
            await running.add(it, 10 + salt)
        stats = {node.node_id: node.role.stats() for node in it.nodes[1:]}
        assert [(s.active, s.queued) for s in stats.values()] == [(2, 0), (2, 0)]
        assert full.node_id in stats
        assert refused(it) == {}


@pytest.mark.parametrize("n", [1, 2])
async def test_both_decode_nodes_full_with_full_queues_is_one_refusal_about_when_the_prompt_is_computed(
    n, cluster, autojump_clock
):
    decode = {"max_running_requests": 2, "admission_queue_size": 0, **BIG}
    async with cluster(decodes=2, decode=decode) as it, load() as running:
        began = trio.current_time()
        await running.add(it)
        unloaded = trio.current_time() - began
        for salt in range(3):
            await running.add(it, salt + 1)
        took = []
        for salt in range(50):
            began = trio.current_time()
            with pytest.raises(ServerBusyError) as caught:
                await it.choices(prompt_of(9, 100 + salt), n, max_tokens=5)
            took.append(trio.current_time() - began)
            assert caught.value.reason == "queue_full"
        assert median(took) <= unloaded + 0.05
        assert refused(it) == {"queue_full": 50.0}
        by_node = [
            node.metrics.registry.get_sample_value("pdserve_refusals_total", {"reason": "queue_full"})
            for node in it.nodes[1:]
        ]
        assert by_node == [50.0, 50.0], "each was asked once by each request"


@pytest.mark.parametrize("n", [1, 2])
async def test_where_the_queues_have_room_the_refusal_comes_once_at_the_admission_deadline(n, cluster, autojump_clock):
    decode = {"max_running_requests": 2, "admission_queue_size": 2, **BIG}
    async with cluster(decodes=2, decode=decode, admission_timeout=2.0) as it, load() as running:
        for salt in range(4):
            await running.add(it, salt)
        began = trio.current_time()
        with pytest.raises(ServerBusyError) as caught:
            await it.choices(prompt_of(9, 99), n, max_tokens=5)
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.05)
        assert caught.value.reason == "timeout"
        assert caught.value.retry_after >= 1
        assert refused(it) == {"timeout": 1.0}


async def test_the_second_node_gets_what_is_left_of_the_admission_deadline(cluster, autojump_clock):
    decode = {"max_running_requests": 1, "admission_queue_size": 1, "admission_timeout": 60.0, **BIG}
    async with cluster(decodes=2, decode=decode, admission_timeout=3.0) as it, load() as running:
        await running.add(it, 1)
        await running.add(it, 2)
        link = it.nodes[1].links[0]._requests
        slow = it.registry.nodes("decode")
        for node in slow:  # both look alike, so that either is asked first; an answer of d0 takes a second
            node.stats = NodeStats(capacity=1, active=1)
        send = link.send

        async def later(frame):
            await trio.sleep(1)
            send(frame)

        link.send = lambda frame: running.nursery.start_soon(later, frame) if isinstance(frame, Busy) else send(frame)
        it.nodes[1].role.pool._queue_size = 0
        slow[1].stats = NodeStats(capacity=1, active=1, queued=1)
        began = trio.current_time()
        with pytest.raises(ServerBusyError):
            await it.ids(prompt_of(9, 3), max_tokens=5)
        assert trio.current_time() - began == pytest.approx(3.0, abs=0.05)


async def test_a_full_queue_is_told_in_the_very_handling_of_the_frame(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 2, "admission_queue_size": 0, **BIG}) as it, load() as running:
        await running.add(it, 1)
        await running.add(it, 2)
        node, answers = it.nodes[1], []
        link = node.links[0]._requests
        send = link.send
        link.send = lambda frame: answers.append(frame)
        tasks = trio.lowlevel.current_statistics().tasks_living
        params = SamplingParams(max_tokens=5)
        node.role.accept_decode(Decode("a", 1, (1, 2), params, b""), link)
        node.role.accept_reserve(Reserve("b", 1, 2, 2, 5, ttl=5.0), link)
        link.send = send
        assert [(frame.id, frame.reason) for frame in answers] == [("a", "queue_full"), ("b", "queue_full")]
        assert trio.lowlevel.current_statistics().tasks_living == tasks


async def test_choices_go_to_a_node_that_has_the_slots(cluster, autojump_clock):
    async with cluster(decode={"max_running_requests": 2}) as it:
        await it.start(DecodeConfig(model="sim-bytes", engine="sim", node_id="big", max_running_requests=6, **BIG))
        for salt in range(8):
            assert len(await it.choices(prompt_of(9, salt), 5, max_tokens=3)) == 5
        assert it.node("d0").metrics.registry.get_sample_value("pdserve_admission_wait_seconds_count") == 0


async def test_one_idle_master_leaves_all_slots_to_the_other(two_masters, autojump_clock):
    async with two_masters(decode={"max_running_requests": 4, **BIG}) as (first, _), load() as running:
        for salt in range(4):
            await running.add(first, salt)
        assert first.node("d0").role.stats().active == 4


async def test_two_busy_masters_are_served_in_order_of_arrival(two_masters, autojump_clock):
    limits = {"max_running_requests": 4, "admission_queue_size": 100, "admission_timeout": 600.0, **BIG}
    async with two_masters(decode=limits, admission_timeout=600.0) as masters:
        role, arrived = masters[0].node("d0").role, []
        accept, granted = role.accept_decode, note_grants(role)

        def note(frame, link):
            arrived.append(frame.id)
            accept(frame, link)

        role.accept_decode = note

        async def ask(master, salt):
            await master.ids(prompt_of(9, salt), max_tokens=2 + salt % 7)

        async with trio.open_nursery() as nursery:
            for salt in range(60):
                nursery.start_soon(ask, masters[salt % 2], salt)
                await trio.sleep(0.0007)
        assert granted == arrived
        assert {id_.split("-")[0] for id_ in arrived[:8]} == {id_.split("-")[0] for id_ in arrived}


@pytest.mark.failure(29)
async def test_a_dead_master_gives_back_its_leases_and_reservations_and_the_other_never_notices(
    two_masters, autojump_clock
):
    async with two_masters(decode={"max_running_requests": 6, **BIG}, retry=False) as (dying, other):
        node = dying.node("d0")
        registered = dying.registry.nodes("decode")[0]
        send = registered.send
        finished, ended = [], []

        async def doomed(n):
            with pytest.raises(WorkerFailedError):
                await dying.choices(prompt_of(9, n), n, max_tokens=3000)
            ended.append(n)

        async def survive():
            finished.append(await other.ids(prompt_of(9, 7), max_tokens=600))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(survive)
            nursery.start_soon(doomed, 1)
            await trio.sleep(0.1)
            registered.send = lambda frame: None if isinstance(frame, Decode) else send(frame)
            nursery.start_soon(doomed, 3)
            await trio.sleep(0.1)
            stats = node.role.stats()
            assert (stats.active, stats.reserved) == (5, 3)
            dying.cut("d0")
            dying.cut("p0")
            with trio.fail_after(1):
                while node.role.stats().active != 1:
                    await trio.sleep(0.001)
        assert node.role.stats().reserved == 0
        assert len(finished[0]) == 600
        assert sorted(ended) == [1, 3]


class OldDecode:
    """A Decode node of before admission: it speaks the handshake without the capability and takes whatever comes."""

    def __init__(self, hello: Hello) -> None:
        self._hello = msgspec.structs.replace(hello, node_id="old", incarnation="old-life", capabilities=())
        self.answer = None
        self.frames: list[object] = []

    async def serve(self, it) -> None:
        client, server = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            it.nursery.start_soon(it.links.handle, server)
            ws = await wrap_client_stream(nursery, client, "master", "/")
            challenge = decode_from_master(await ws.get_message())
            await ws.send_message(encode(signed(self._hello, "", challenge.nonce)))
            self.answer = decode_from_master(await ws.get_message())
            await ws.send_message(encode(NodeStats(capacity=4)))
            while True:
                frame = decode_from_master(await ws.get_message())
                self.frames.append(frame)
                if isinstance(frame, Decode):
                    await ws.send_message(encode(Admitted(frame.id, frame.epoch, frame.choice)))
                    end = Delta(frame.id, frame.epoch, 0, (65,), "A", (), "length", choice=frame.choice)
                    await ws.send_message(encode(end))


async def test_a_decode_node_without_admission_is_refused_and_named(cluster, autojump_clock, caplog):
    async with cluster() as it, trio.open_nursery() as nursery:
        old = OldDecode(it.registry.nodes("decode")[0].hello)

        async def refused_node():
            with pytest.RaisesGroup(Exception, allow_unwrapped=True, flatten_subgroups=True):
                await old.serve(it)

        nursery.start_soon(refused_node)
        await trio.sleep(1)
        assert old.answer.code == "capability"
        for text in (old.answer.reason, caplog.text, *it.master.readiness().reasons):
            assert "decode_admission" in text
        assert "old" in it.master.readiness().reasons[0]
        assert [node.node_id for node in it.registry.nodes("decode")] == ["d0"]
        nursery.cancel_scope.cancel()


async def test_under_the_flag_a_decode_node_without_admission_serves(cluster, autojump_clock):
    async with cluster(disable_admission=True) as it, trio.open_nursery() as nursery:
        old = OldDecode(it.registry.nodes("decode")[0].hello)
        it.scopes["d0"].cancel()
        it.nodes.pop()
        nursery.start_soon(old.serve, it)
        await trio.sleep(1)
        assert [node.node_id for node in it.registry.nodes("decode")] == ["old"]
        assert await it.ids(prompt_of(9), max_tokens=1) == [65]
        assert await it.choices(prompt_of(9), 3, max_tokens=1) == {0: [65], 1: [65], 2: [65]}
        assert not [frame for frame in old.frames if isinstance(frame, Reserve)]
        nursery.cancel_scope.cancel()
