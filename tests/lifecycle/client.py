"""One request to the HTTP app, as the server under it would make it, and whether what came back is an honest answer."""

from __future__ import annotations

import json
from typing import Any

import trio

from lifecycle.cluster import TOKENIZER
from pdserve.engine.sim import expected_tokens
from pdserve.wire.messages import SamplingParams

HONEST = (429, 502, 503, 504)
"""Statuses that a valid request may get instead of its answer."""


class Client:
    """Everything that comes back to one request; setting `gone` closes its connection."""

    def __init__(self, app: Any, body: dict[str, Any]) -> None:
        self._app = app
        self._body = body
        self._asked = False
        self.gone = trio.Event()
        self.status: int | None = None
        self.ended = False
        self.data = b""

    async def run(self) -> None:
        body = json.dumps(self._body).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await self._app({**scope, "root_path": ""}, self._receive, self._send)
        self.ended = True

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": json.dumps(self._body).encode(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
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

    def outcome(self) -> str:
        """How a streamed request has ended; raises AssertionError unless that is something a client can rely on.

        Its body has `temperature` and `seed`, so that each choice has one right output.
        """
        if self.gone.is_set():
            return "gone"
        if self.status != 200:
            assert self.status in HONEST, self.status
            assert json.loads(self.data)["error"]["message"]
            return str(self.status)
        done = self.events[-1] == "[DONE]"
        documents = [json.loads(event) for event in (self.events[:-1] if done else self.events)]
        n = self._body.get("n", 1)
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
            want = self._expected(choice)
            assert got == want[: len(got)], f"choice {choice} says something else"
            assert (got == want) == (choice in finished), f"choice {choice} ends early or without a finish"
        assert done == (len(finished) == n and not errors), "[DONE] without the end, or an end without [DONE]"
        assert done or errors, "the stream just stops"
        return "complete" if done else "error event"

    def _expected(self, choice: int) -> list[int]:
        body = self._body
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"])
        return expected_tokens(body["prompt"], params, choice, TOKENIZER.eos_token_ids, vocab_size=258)
