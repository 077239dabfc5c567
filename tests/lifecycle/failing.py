"""What the tests of failures share: clients over HTTP, nodes that die hard, frames that are changed, lost or kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import trio

from lifecycle.client import Client
from lifecycle.cluster import BASE, TOKENIZER, Cluster
from pdserve.config import DecodeConfig, PrefillConfig
from pdserve.engine.sim import expected_tokens
from pdserve.http.app import build_app
from pdserve.wire.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from pdserve.master.registry import Node

INTERVAL = 1.0
BEATS = {"heartbeat_interval": INTERVAL}
"""For Master and nodes where a silence has to be found soon."""


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 13) % 200 + 32 for i in range(length)]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    return expected_tokens(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))


@attrs.frozen
class Outcome:
    """What a client has got: `ids` without gap or duplicate, and whether it may take them for complete."""

    status: int | None
    ids: list[int]
    errors: list[dict]
    finish: list[str]
    done: bool

    @property
    def failed(self) -> bool:
        """One clear error, and nothing that looks like a clean finish."""
        return len(self.errors) == 1 and bool(self.errors[0]["message"]) and not self.finish and not self.done


def outcome_of(client: Client) -> Outcome:
    if client.status != 200 or not client.data.startswith(b"data: "):
        document = json.loads(client.data)
        choices = document.get("choices", ())
        finish = [choice["finish_reason"] for choice in choices]
        ids = [token for choice in choices for token in choice["token_ids"]]
        return Outcome(client.status, ids, [document["error"]] if "error" in document else [], finish, bool(choices))
    events = [event for event in client.events if event != "[DONE]"]
    documents = [json.loads(event) for event in events]
    ids, finish = [], []
    for choice in (choice for document in documents for choice in document.get("choices", ())):
        assert not choice["token_ids"] or choice["start_index"] == len(ids)
        ids += choice["token_ids"]
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    errors = [document["error"] for document in documents if "error" in document]
    return Outcome(client.status, ids, errors, finish, client.events[-1] == "[DONE]")


def front(it: Cluster, **options):
    """The HTTP app of that Master."""
    return build_app(
        it.master,
        tokenizer=TOKENIZER,
        template=None,
        model_name="sim-bytes",
        metrics=it.metrics,
        is_draining=lambda: False,
        **options,
    )


def body_of(prompt: list[int], **more) -> dict:
    return {"prompt": prompt, "temperature": 0, "return_token_ids": True, "stream": True, "max_tokens": 5, **more}


async def ask(it: Cluster, prompt: list[int], **more) -> Outcome:
    """One HTTP request, to its end."""
    client = Client(front(it), body_of(prompt, **more))
    await client.run()
    return outcome_of(client)


def registered(it: Cluster, node_id: str) -> Node | None:
    return next((node for node in it.registry.nodes() if node.node_id == node_id), None)


def change(it: Cluster, node_id: str, by: Callable[[msgspec.Struct], msgspec.Struct | None]) -> None:
    """What the Master sends that node from now on is what `by` makes of it; None: the frame is lost."""
    node = registered(it, node_id)
    assert node is not None
    send = node.send

    def through(frame: msgspec.Struct) -> None:
        changed = by(frame)
        if changed is not None:
            send(changed)

    node.send = through


def watch(it: Cluster) -> list[tuple[str, msgspec.Struct]]:
    """(node, frame) of everything about requests that nodes send to the Master from now on."""
    seen: list[tuple[str, msgspec.Struct]] = []
    route = it.links._route

    def through(node: Node, frame: msgspec.Struct) -> None:
        seen.append((node.node_id, frame))
        route(node, frame)

    it.links._route = through
    return seen


def die(it: Cluster, node_id: str) -> None:
    """The process is gone without a word: its link breaks, its memory and its transfers with it."""
    node = it.node(node_id)
    it.nodes = [one for one in it.nodes if one is not node]
    it.cut(node_id)
    it.scopes[node_id].cancel()


def fail_steps(it: Cluster, node_id: str, when: Callable[[object], bool] = lambda plan: True) -> list[object]:
    """That node's engine raises in a step for which `when(plan)`, which ends the node. The plans that did it."""
    node, failed = it.node(node_id), []
    step = node.loop.engine.step

    def broken(plan):
        if not when(plan):
            return step(plan)
        failed.append(plan)
        it.dead.add(node.incarnation)
        it.nodes = [one for one in it.nodes if one is not node]
        raise RuntimeError("failed on purpose")

    node.loop.engine.step = broken
    return failed


async def bury() -> None:
    """Before the end of a test: nodes whose engine has failed have closed their links and ended."""
    await trio.sleep(3)


def config(node_id: str, **more) -> PrefillConfig | DecodeConfig:
    """Of a Prefill node where the name begins with p."""
    kind = PrefillConfig if node_id.startswith("p") else DecodeConfig
    return kind(**{**BASE, "node_id": node_id, **more})


async def until(done, within: float) -> None:
    with trio.fail_after(within):
        while not done():
            await trio.sleep(0.005)
