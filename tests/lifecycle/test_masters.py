"""Masters behind DNS names: real Masters and a real node in virtual time, with a resolver that says what it is told."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import httpx
import pytest
import trio
import trio.testing
from trio_websocket import wrap_client_stream

from pdserve.config import DecodeConfig
from pdserve.engine.sim import SimEngine
from pdserve.errors import FatalError
from pdserve.master.links import NodeLinks
from pdserve.nurseries.groups import leaves
from pdserve.telemetry.metrics import MasterMetrics
from pdserve.text.models import load_model_card, resolve_model
from pdserve.text.tokenizer import load_tokenizer
from pdserve.transfer.memory_agent import MemoryAgent, MemoryNetwork
from pdserve.worker.masters import MasterName
from pdserve.worker.node import WorkerNode
from pdserve.worker.status import status_app

pytestmark = pytest.mark.trio

FILES = resolve_model("sim-bytes")
CARD = load_model_card(FILES, max_seq_len=4096)
A, B = "10.0.0.1", "10.0.0.2"


class World:
    """Who listens at which address, and what the resolver answers: addresses, an error, or None, never an answer."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.at: dict[str, NodeLinks] = {}
        self.answers: dict[str, list[str] | Exception | None] = {}
        self.lookups: list[tuple[str, float]] = []
        self.dials: list[str] = []
        self.scopes: dict[str, trio.CancelScope] = {}

    def name(self, host: str) -> MasterName:
        return MasterName(f"ws://{host}:8100", self.dial, partial(self.resolve, host))

    async def resolve(self, host: str) -> list[str]:
        self.lookups.append((host, trio.current_time()))
        answer = self.answers[host]
        if answer is None:
            await trio.sleep_forever()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def dial(self, address: str):
        async def dial(nursery):
            self.dials.append(address)
            if address not in self.at:
                raise ConnectionRefusedError(f"nobody at {address}")
            client, server = trio.testing.memory_stream_pair()
            self.nursery.start_soon(self.handle, address, server)
            return await wrap_client_stream(nursery, client, "master", "/")

        return dial

    async def handle(self, address: str, server: trio.abc.Stream) -> None:
        links = self.at[address]
        with trio.CancelScope() as self.scopes[address]:
            await links.handle(server)

    def cut(self, address: str) -> None:
        """The newest connection to that address ends."""
        self.scopes[address].cancel()


@asynccontextmanager
async def running(world: World, sources, **config):
    """A Decode node that serves `sources`."""
    node = WorkerNode(
        DecodeConfig(model="sim-bytes", engine="sim", node_id="w", **config),
        SimEngine(
            card=CARD,
            vocab_size=256,
            eos_token_ids=(0,),
            num_pages=64,
            page_size=16,
            prefill_tokens_per_s=1e5,
            decode_ms=5,
        ),
        load_tokenizer(FILES),
        make_agent=lambda name: MemoryAgent(name, MemoryNetwork(), clock=trio.current_time, delay=None),
        thread=None,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run, sources)
        yield node
        nursery.cancel_scope.cancel()


@pytest.fixture
async def world(cluster):
    """A Master `world.a` at A; `world.b` is another one, at no address yet."""
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(cluster()) for _ in range(2)]
        async with trio.open_nursery() as nursery:
            it = World(nursery)
            it.a, it.b, it.at[A] = a, b, a.links
            yield it
            nursery.cancel_scope.cancel()


def states(node: WorkerNode) -> dict[str, str]:
    return {link.url: link.state for link in node.links}


def knows(master) -> bool:
    return any(node.node_id == "w" for node in master.registry.nodes())


def generation(master) -> int:
    return next(node.generation for node in master.registry.nodes() if node.node_id == "w")


async def ready(node: WorkerNode) -> tuple[int, list[str]]:
    app = status_app(node.role, node.masters, node.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
        answer = await client.get("/readyz")
        tree = (await client.get("/debug/tree")).json()
    assert [link["master"] for link in tree["links"]] == [link.url for link in node.links]
    assert tree["unresolved"] == node.masters.unresolved
    return answer.status_code, answer.json()["reasons"]


async def test_every_address_of_a_name_has_a_link_and_new_ones_get_one(world, autojump_clock):
    world.answers["m"] = [A]
    async with running(world, [world.name("m")]) as node:
        await trio.sleep(1)
        assert states(node) == {f"ws://m:8100 ({A})": "registered"}
        world.at[B] = world.b.links
        world.answers["m"] = [B, A]
        await trio.sleep(30)
        assert states(node) == {f"ws://m:8100 ({A})": "registered", f"ws://m:8100 ({B})": "registered"}
        assert knows(world.a)
        assert knows(world.b)
        assert [time for _, time in world.lookups] == pytest.approx([0, 30], abs=0.1 + world.lookups[0][1])
        assert await ready(node) == (200, [])


async def test_a_link_that_works_outlives_its_address_and_goes_once_it_is_lost(world, autojump_clock):
    world.answers["m"] = [A, B]
    world.at[B] = world.b.links
    async with running(world, [world.name("m")], resolve_interval=10.0) as node:
        await trio.sleep(1)
        world.answers["m"] = [B]
        before = generation(world.a)
        await trio.sleep(60)
        assert generation(world.a) == before
        assert set(states(node).values()) == {"registered"}
        world.cut(A)  # and it is back at once: still a healthy link
        await trio.sleep(60)
        assert generation(world.a) > before
        del world.at[A]
        world.cut(A)
        await trio.sleep(20)
        assert states(node) == {f"ws://m:8100 ({B})": "registered"}
        dials = world.dials.count(A)
        await trio.sleep(60)
        assert world.dials.count(A) == dials
        world.at[A], world.answers["m"] = world.a.links, [A, B]
        await trio.sleep(20)
        assert knows(world.a)
        assert len(node.links) == 2


async def test_a_failed_lookup_changes_nothing_and_is_told_once(world, autojump_clock, caplog):
    caplog.set_level(logging.WARNING, "pdserve.masters")
    world.answers["m"] = OSError("no such name")
    async with running(world, [world.name("m")]) as node:
        await trio.sleep(21)
        assert await ready(node) == (503, ["ws://m:8100: not resolved: no such name"])
        assert len(world.lookups) == 5  # every 5 s: nothing is served
        assert caplog.text.count("no such name") == 1
        world.answers["m"] = []
        await trio.sleep(5)
        assert "ws://m:8100: not resolved: no address" in caplog.text
        world.answers["m"] = [A]
        await trio.sleep(5)
        assert await ready(node) == (200, [])
        before = generation(world.a)
        for answer in (OSError("gone"), UnicodeError("a bad label"), None, []):
            world.answers["m"] = answer
            await trio.sleep(70)
        assert caplog.text.count("gone") == caplog.text.count("a bad label") == 1
        assert await ready(node) == (200, [])
        assert generation(world.a) == before


async def test_a_lookup_that_hangs_ends_and_holds_up_nobody(world, autojump_clock):
    world.answers = {"hangs": None, "m": [A]}
    world.at[B] = world.b.links
    sources = [world.name("hangs"), world.name("m"), ("ws://fixed", world.dial(B))]
    async with running(world, sources, resolve_interval=1.0) as node:
        await trio.sleep(0.5)
        assert states(node) == {"ws://fixed": "registered", f"ws://m:8100 ({A})": "registered"}
        assert await ready(node) == (200, ["ws://hangs:8100: not resolved yet"])
        await trio.sleep(10)
        assert await ready(node) == (200, ["ws://hangs:8100: not resolved: no answer within 10 s"])
        assert [host for host, _ in world.lookups].count("m") > 5
        world.answers["hangs"] = ["10.9.9.9"]
        await trio.sleep(12)
        assert (await ready(node))[1] == ["ws://hangs:8100 (10.9.9.9): nobody at 10.9.9.9"]


@pytest.mark.parametrize("names", [{"m": [A, B]}, {"m": [A], "alias": [B]}], ids=["two addresses", "two names"])
async def test_one_master_twice_is_served_once_and_the_other_takes_over(names, world, autojump_clock, caplog):
    caplog.set_level(logging.INFO)
    world.answers = names
    world.at[B] = world.a.links
    async with running(world, [world.name(host) for host in names]) as node:
        await trio.sleep(1)
        before = generation(world.a)
        first, second = sorted(node.links, key=lambda link: link.registered, reverse=True)
        assert first.registered
        assert second.state == f"the same Master as {first.url}"
        assert await ready(node) == (200, [])
        await trio.sleep(200)
        assert generation(world.a) == before
        assert len(world.dials) < 10
        assert caplog.text.count("the same Master as") == 1
        assert "ended in its handshake" not in caplog.text

        address = A if A in first.url else B
        del world.at[address]
        world.cut(address)
        await trio.sleep(1)
        assert second.registered
        assert generation(world.a) == before + 1
        assert await ready(node) == (200, [f"{first.url}: nobody at {address}"])
        world.at[address] = world.a.links
        await trio.sleep(10)
        assert first.state == f"the same Master as {second.url}"
        assert await ready(node) == (200, [])
        assert generation(world.a) == before + 1


async def test_a_link_that_stands_by_notices_another_master(world, autojump_clock):
    world.answers["m"] = [A, B]
    world.at[B] = world.a.links
    async with running(world, [("ws://a", world.dial(A)), ("ws://b", world.dial(B))], resolve_interval=20.0) as node:
        await trio.sleep(1)
        assert [link.redundant for link in node.links].count(True) == 1
        spare = next(A if link.url == "ws://a" else B for link in node.links if link.redundant)
        world.at[spare] = world.b.links
        await trio.sleep(21)
        assert [link.registered for link in node.links] == [True, True]
        assert not any(link.redundant for link in node.links)
        assert knows(world.b)


async def test_a_claim_that_comes_to_nothing_is_given_up(world, autojump_clock):
    """The link that came first is refused: the one that stood by for it serves."""
    links = world.a.links
    world.at[B] = NodeLinks(
        world.a.registry,
        MasterMetrics(),
        CARD,
        links._incarnation,
        token="another",
        heartbeat_interval=2.0,
        need_admission=True,
    )
    async with running(world, [("ws://b", world.dial(B)), ("ws://a", world.dial(A))]) as node:
        await trio.sleep(2)
        refused, served = node.links
        assert served.registered
        assert knows(world.a)
        assert refused.state == "the same Master as ws://a"


async def test_a_master_that_is_replaced_at_its_address_is_served_again(world, autojump_clock):
    world.answers["m"] = [A]
    async with running(world, [world.name("m")]) as node:
        await trio.sleep(1)
        world.at[A] = world.b.links
        world.cut(A)
        await trio.sleep(2)
        assert knows(world.b)
        assert not knows(world.a)
        assert await ready(node) == (200, [])


async def test_a_fatal_error_of_a_link_ends_the_node(world, autojump_clock):
    async def dial(nursery):
        raise FatalError("the engine hangs")

    world.answers["m"] = [A]
    with pytest.raises(ExceptionGroup) as caught:
        async with running(world, [world.name("m"), ("ws://x", dial)]):
            await trio.sleep(1)
    assert [str(leaf) for leaf in leaves(caught.value)] == ["the engine hangs"]


async def test_a_drain_ends_links_and_lookups(world, autojump_clock):
    world.answers = {"m": [A], "hangs": None}
    async with running(world, [world.name("m"), world.name("hangs")]) as node:
        await trio.sleep(1)
        await node.drain()
        await trio.sleep(2)
        assert not knows(world.a)
        count = len(world.lookups)
        await trio.sleep(100)
        assert len(world.lookups) == count
