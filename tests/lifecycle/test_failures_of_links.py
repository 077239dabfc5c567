"""Links that lose a frame, fall silent or lead to a Master that is gone: found in seconds, then dialled again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio
import trio.testing
from trio_websocket import wrap_client_stream

from lifecycle.failing import BEATS, INTERVAL, ask, config, die, expected, prompt_of, registered, until
from pdserve.wire.messages import Ping

pytestmark = pytest.mark.trio


class Losing(trio.abc.SendStream):
    """Loses the n-th thing that is sent, counted from 0."""

    def __init__(self, inner: trio.abc.SendStream, lost: int) -> None:
        self._inner = inner
        self._left = lost

    async def send_all(self, data) -> None:
        self._left -= 1
        if self._left == -1:
            await trio.lowlevel.checkpoint()
        else:
            await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()


@pytest.mark.failure(8)
@pytest.mark.parametrize("lost", ["upgrade", "hello", "answer to the upgrade", "challenge", "welcome"])
@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_a_lost_frame_of_the_handshake_costs_seconds(name, lost, cluster, autojump_clock):
    async with cluster(**BEATS) as it:
        die(it, name)
        await trio.sleep(0.1)
        clients = {"upgrade": 0, "hello": 1}
        servers = {"answer to the upgrade": 0, "challenge": 1, "welcome": 2}
        ended = trio.Event()

        def dialler(node_id: str):
            plain = type(it).dialler(it, node_id)
            losses = iter([True])

            async def dial(nursery: trio.Nursery):
                if not next(losses, False):
                    return await plain(nursery)
                client, server = trio.testing.memory_stream_pair()
                if lost in clients:
                    client = trio.StapledStream(Losing(client.send_stream, clients[lost]), client.receive_stream)
                else:
                    server = trio.StapledStream(Losing(server.send_stream, servers[lost]), server.receive_stream)

                async def handle() -> None:
                    await it.links.handle(server)
                    ended.set()

                it.nursery.start_soon(handle)
                return await wrap_client_stream(nursery, client, "master", "/")

            return dial

        it.dialler = dialler
        began = trio.current_time()
        node = await it.start(config(name, **BEATS))
        await until(lambda: node.links[0].registered, 15)
        assert trio.current_time() - began < 13
        await until(ended.is_set, 1)
        found = await ask(it, prompt_of(40))
        assert (found.ids, found.done) == (expected(prompt_of(40), 5), True)


def stop_reading(it, name: str) -> None:
    it.client_ends[name].receive_stream.receive_some_hook = trio.sleep_forever
    registered(it, name).send(Ping())  # taken by the reader that waits already; the next one is not


def stop_writing(it, name: str) -> None:
    it.client_ends[name].send_stream.send_all_hook = trio.sleep_forever
    it.node(name).links[0].report()  # arrives; the next one does not


def stop_both(it, name: str) -> None:
    it.mute(name)


@pytest.mark.failure(26)
@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("stop", [stop_reading, stop_writing, stop_both])
async def test_a_link_that_is_stopped_either_way_is_found_from_both_ends_within_three_heartbeats(
    stop, name, cluster, autojump_clock
):
    async with cluster(prefill=BEATS, decode=BEATS, retry=False, **BEATS) as it:
        it.network.delay = 10.0  # so that both nodes have something of the request
        node, before, answers = it.node(name), registered(it, name), []

        async def run() -> None:
            answers.append(await ask(it, prompt_of(40)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(0.5)
            assert node.role.stats().active == 1
            stop(it, name)
            limit = 3 * INTERVAL + 0.1
            began = trio.current_time()
            async with trio.open_nursery() as waits:
                waits.start_soon(until, lambda: before not in it.registry.nodes(), limit)
                waits.start_soon(until, lambda: node.role.stats().active == 0, limit)
                waits.start_soon(until, lambda: bool(answers), limit)
            assert trio.current_time() - began > 1.5 * INTERVAL, "found by heartbeat, not by a broken connection"
        assert answers[0].failed
        it.network.delay = 0.0
        with trio.fail_after(10):  # it dials again
            while registered(it, name) in (None, before):
                await trio.sleep(0.1)
        assert (await ask(it, prompt_of(40, 1))).ids == expected(prompt_of(40, 1), 5)
        await trio.sleep(7)  # the READ of the first request ends in its own time


@pytest.mark.failure(29)
async def test_a_dead_master_is_dialled_with_back_off_until_it_is_there_again(cluster, autojump_clock):
    async with cluster(decodes=0) as it:
        dials, down = [], []

        def dialler(node_id: str):
            plain = type(it).dialler(it, node_id)

            async def dial(nursery: trio.Nursery):
                dials.append(trio.current_time())
                if down:
                    raise ConnectionRefusedError("nobody there")
                return await plain(nursery)

            return dial

        it.dialler = dialler
        await it.start(config("d0"))
        assert len(dials) == 1
        down.append(True)
        it.cut("d0")
        await trio.sleep(120)
        gaps = [later - earlier for earlier, later in pairwise(dials[1:])]
        assert max(gaps[:2]) < 1.0, "at first soon"
        assert min(gaps[6:]) > 2.0, "then slowly"
        assert max(gaps) < 5.1, "but never given up"
        down.clear()
        await until(lambda: it.node("d0").links[0].registered, 5.1)
        assert (await ask(it, prompt_of(40))).ids == expected(prompt_of(40), 5)


@pytest.mark.parametrize(("master", "nodes"), [(10.0, 1.0), (1.0, 10.0)])
async def test_heartbeats_of_different_pace_keep_a_link_and_find_a_silence(master, nodes, cluster, autojump_clock):
    async with cluster(
        prefill={"heartbeat_interval": nodes}, decode={"heartbeat_interval": nodes}, heartbeat_interval=master
    ) as it:
        before = registered(it, "d0")
        await trio.sleep(60)
        assert registered(it, "d0") is before
        it.mute("d0")
        await until(lambda: registered(it, "d0") not in (None, before), 3 * min(master, nodes) + 5)
        await until(lambda: registered(it, "p0") is not None, 40)


async def test_two_processes_with_one_id_replace_each_other_at_a_walk_and_are_named(cluster, autojump_clock, caplog):
    async with cluster() as it:
        first = it.node("d0")
        second = await it.start(config("d0"))
        begin, served = registered(it, "d0").generation, 0
        for salt in range(60):
            served += (await ask(it, prompt_of(30, salt))).done
            await trio.sleep(1)
        assert registered(it, "d0").generation - begin < 60
        assert served > 50
        assert sum("--node-id must differ" in message for message in caplog.messages) > 5
        it.nodes.remove(first)
        await trio.sleep(6)
        assert {first.links[0].registered, second.links[0].registered} == {True, False}
        it.nodes.append(first)


async def test_a_probe_of_the_node_port_is_over_at_once(cluster, autojump_clock, caplog):
    async with cluster() as it:
        client, server = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.links.handle, server)
            await trio.sleep(0.1)
            began = trio.current_time()
            await client.aclose()
        assert trio.current_time() - began < 0.1
        assert not [
            record for record in caplog.records if record.levelname != "DEBUG" and "handshake" in record.message
        ]


async def test_an_idle_node_that_drains_is_gone_at_once(cluster, autojump_clock):
    async with cluster() as it:
        for name in ("d0", "p0"):
            node, began = it.node(name), trio.current_time()
            await node.drain()
            await until(lambda node=node: node not in it.nodes, 10)
            assert trio.current_time() - began < 1
