"""A fault at every step: one request through HTTP app, Master, Prefill and Decode, and a failure at its k-th task step.

Everything is deterministic: virtual time, Trio's scheduler seeded, engine and transfers in the same thread. A run is
named by (fault, n, nodes, seed, k), and the same name replays the same order of steps.
"""

from __future__ import annotations

import json
import logging
import random
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio
import trio.testing

from lifecycle.cluster import BASE, TOKENIZER, Cluster
from pdserve.config import DecodeConfig, PrefillConfig
from pdserve.engine.sim import expected_tokens
from pdserve.errors import TransferError
from pdserve.http.app import build_app
from pdserve.wire.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = tuple((i * 7) % 90 + 33 for i in range(37))
SAMPLED = {"temperature": 1.0, "seed": 3}
TOKENS = 12
LOSSES = (
    "link of prefill lost",
    "link of decode lost",
    "link of prefill silent",
    "link of decode silent",
    "prefill replaced",
    "decode replaced",
    "engine of prefill raises",
    "engine of decode raises",
)
"""Of a node."""
FAULTS = ("client leaves", "transfer fails", *LOSSES)


@attrs.frozen
class Run:
    """`k` None: nothing fails, and the steps are counted."""

    fault: str
    n: int
    nodes: int
    """How many of each role."""
    seed: int
    k: int | None


class Steps(trio.abc.Instrument):
    """Counts task steps while it is armed, and acts at the k-th."""

    def __init__(self, k: int | None) -> None:
        self.count = 0
        self._k = k
        self._armed = False
        self._act: Callable[[], None] | None = None

    def arm(self, act: Callable[[], None]) -> None:
        self._armed, self._act = True, act

    def disarm(self) -> None:
        self._armed = False

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._armed:
            return
        self.count += 1
        if self.count == self._k and self._act is not None:
            act, self._act = self._act, None
            act()


class Client:
    """One request to the HTTP app, as the server under it would make it, and everything that came back."""

    def __init__(self, app, body: dict) -> None:
        self._app = app
        self._body = json.dumps(body).encode()
        self._asked = False
        self.gone = trio.Event()
        self.status: int | None = None
        self.ended = False
        self.data = b""

    async def run(self) -> None:
        headers = [(b"content-length", str(len(self._body)).encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await self._app({**scope, "root_path": ""}, self._receive, self._send)
        self.ended = True

    async def _receive(self) -> dict:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            assert self.status is None, "two status lines"
            self.status = message["status"]
        else:
            self.data += message.get("body", b"")

    @property
    def events(self) -> list[str]:
        return [event.removeprefix("data: ") for event in self.data.decode().split("\n\n") if event]

    @property
    def began(self) -> bool:
        """Whether any output has come."""
        return b'"token_ids"' in self.data

    def check(self, n: int) -> str:
        """The outcome; raises AssertionError unless it is exactly one that a client can rely on."""
        if self.status != 200:
            assert self.status in (429, 502, 503, 504), self.status
            assert json.loads(self.data)["error"]["message"]
            return str(self.status)
        *events, last = self.events
        done = last == "[DONE]"
        documents = [json.loads(event) for event in (events if done else self.events)]
        ids: dict[int, list[int]] = {choice: [] for choice in range(n)}
        finished: set[int] = set()
        errors = 0
        for document in documents:
            errors += "error" in document
            for choice in document.get("choices", ()):
                mine = ids[choice["index"]]
                assert choice["index"] not in finished, "output after the finish"
                assert choice["start_index"] == len(mine), "a gap or a duplicate"
                mine += choice["token_ids"]
                finished |= {choice["index"]} if choice["finish_reason"] else set()
        for choice, got in ids.items():
            want = expected(choice)
            assert got == want[: len(got)], f"choice {choice} says something else"
            assert (got == want) == (choice in finished), f"choice {choice} ends early or without a finish"
        assert done == (len(finished) == n and not errors), "[DONE] without the end, or an end without [DONE]"
        assert done or errors, "the stream just stops"
        return "complete" if done else "error event"


def expected(choice: int) -> list[int]:
    params = SamplingParams(max_tokens=TOKENS, **SAMPLED)
    return expected_tokens(PROMPT, params, choice, TOKENIZER.eos_token_ids, vocab_size=258)


class World(Cluster):
    """A cluster with the HTTP app on top, whose nodes are started again when they die."""

    def __init__(self, nursery: trio.Nursery, run: Run) -> None:
        super().__init__(nursery)
        self.run = run
        self.app = build_app(
            self.master,
            tokenizer=TOKENIZER,
            template=None,
            model_name="sim-bytes",
            metrics=self.metrics,
            is_draining=lambda: False,
        )

    def client(self) -> Client:
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "n": self.run.n, "stream": True, "return_token_ids": True}
        return Client(self.app, {**body, **SAMPLED})

    def config(self, node_id: str) -> PrefillConfig | DecodeConfig:
        kind = PrefillConfig if node_id.startswith("p") else DecodeConfig
        return kind(**BASE, node_id=node_id, heartbeat_interval=1.0)

    async def start_all(self) -> None:
        for i in range(self.run.nodes):
            await self.start(self.config(f"p{i}"))
            await self.start(self.config(f"d{i}"))

    def act(self, client: Client) -> None:
        """What fails, synchronously, in the middle of whatever runs."""
        fault = self.run.fault
        victim = self._victim("p" if "prefill" in fault else "d")
        if fault == "client leaves":
            client.gone.set()
        elif fault.endswith("lost"):
            self.cut(victim)
        elif fault.endswith("silent"):
            self.mute(victim)
        elif fault.endswith("replaced"):
            self.nursery.start_soon(self._replace, victim)
        elif fault == "transfer fails":
            self._fail_transfers()
        else:
            self._fail_engine(victim)

    def _victim(self, letter: str) -> str:
        """The node that serves the request, once that is known."""
        serving = [name for request in self.master.coordinator.snapshot() for name in request["nodes"]]
        return next((name for name in serving if name.startswith(letter)), f"{letter}0")

    def _fail_transfers(self) -> None:
        reads = [read for agent in self.network._agents.values() for read in agent._reads.values() if not read.done]
        for read in reads:
            read.failure = TransferError("failed on purpose")
        if not reads:
            self.network.fail_next(TransferError("failed on purpose"))

    def _fail_engine(self, victim: str) -> None:
        node = self.node(victim)
        self.dead.add(node.incarnation)

        def step(plan: object) -> None:
            self.nursery.start_soon(self._start_again, node)
            raise RuntimeError("failed on purpose")

        node.loop.engine.step = step

    def forgive(self) -> None:
        """A failure that nothing has met until now stays away."""
        self.network._failures.clear()
        for node in self.nodes:
            if node.incarnation in self.dead:
                vars(node.loop.engine).pop("step", None)

    async def _start_again(self, node) -> None:
        """What the supervisor of a process does."""
        await trio.sleep(0.3)
        await self.start(self.config(node.node_id))

    async def _replace(self, victim: str) -> None:
        """A second life registers while the first one still thinks that it is there; that one never comes back."""
        old, scope = self.node(victim), self.scopes[victim]

        async def never(nursery: trio.Nursery) -> None:
            await trio.sleep_forever()

        for link in old.links:
            link._dial = never
        await self.start(self.config(victim))
        await trio.sleep(1)
        self.nodes = [node for node in self.nodes if node is not old]
        old.check_integrity(quiet=True)
        scope.cancel()


async def serve_one(run: Run, steps: Steps) -> str:
    """One request with its fault, then whether everything is as it was. Returns the outcome."""
    async with trio.open_nursery() as nursery:
        world = World(nursery, run)
        await world.start_all()
        client = world.client()
        steps.arm(partial(world.act, client))
        with trio.fail_after(60):
            await client.run()
        steps.disarm()
        outcome = "gone" if client.gone.is_set() else client.check(run.n)
        if run.fault in LOSSES and run.nodes > 1 and not client.began:
            assert outcome == "complete", f"{outcome}, before any output and with other nodes there"
        await trio.sleep(10 if run.fault.endswith("silent") else 2)  # silence takes three heartbeats to be noticed
        world.forgive()
        await world.quiet(5.0)
        assert not world.master.coordinator.snapshot(), "the Master still has requests"
        assert world.metrics.registry.get_sample_value(
            "pdserve_requests_in_flight", {"endpoint": "/v1/completions"}
        ) in (0, None)
        last = world.client()
        with trio.fail_after(60):
            await last.run()
        assert last.check(run.n) == "complete", last.data
        await world.quiet(1.0)
        nursery.cancel_scope.cancel()
    return outcome


def play(run: Run) -> tuple[str, int]:
    """The outcome of a run, and how many steps it had. Raises what is wrong, with the run's name."""
    scheduler = trio._core._run
    random.seed(run.seed)
    scheduler._r.seed(run.seed)
    before, scheduler._ALLOW_DETERMINISTIC_SCHEDULING = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, True
    steps = Steps(run.k)
    logging.disable(logging.CRITICAL)
    try:
        clock = trio.testing.MockClock(autojump_threshold=0)
        return trio.run(serve_one, run, steps, clock=clock, instruments=[steps]), steps.count
    except BaseException as error:
        error.add_note(f"to replay: {run}")
        raise
    finally:
        logging.disable(logging.NOTSET)
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before
