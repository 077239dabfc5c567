"""One request as a client sees it, down to the byte: nothing is pooled, repeated or repaired."""

from __future__ import annotations

import json
from contextlib import suppress

import attrs
import h11
import trio

_HOST = "127.0.0.1"


@attrs.define
class Answer:
    """What has come so far; it is filled while the request runs, so that one that is given up can be looked at."""

    status: int | None = None
    events: list[dict] = attrs.field(factory=list)
    """Of a stream, `[DONE]` excepted."""
    done: bool = False
    """`[DONE]` was the last that came."""
    complete: bool = False
    """The response ended in the way HTTP says it ends."""
    broken: str = ""
    """Why the connection ended before that."""
    tokens: int = 0
    _body: bytes = b""

    def add(self, data: bytes) -> int:
        """Take bytes of the body; how many tokens came with them."""
        self._body += data
        if self.status != 200:
            return 0
        *whole, self._body = self._body.split(b"\n\n")
        before = self.tokens
        for event in whole:
            self.done = event == b"data: [DONE]"
            if not self.done:
                self.events.append(json.loads(event.removeprefix(b"data:")))
                self.tokens += sum(len(choice.get("token_ids", ())) for choice in self.events[-1].get("choices", ()))
        return self.tokens - before

    @property
    def rest(self) -> bytes:
        """The body of an answer that is no stream; what is left over of one that is."""
        return self._body


async def ask(
    port: int, body: dict, answer: Answer, on_tokens=lambda count: None, *, path: str = "/v1/completions"
) -> None:
    """Send one request on a connection of its own and read the answer to its end. Cancelled, the client just leaves."""
    content = json.dumps(body).encode()
    headers = [("host", _HOST), ("content-type", "application/json"), ("content-length", str(len(content)))]
    connection = h11.Connection(h11.CLIENT)
    request = connection.send(h11.Request(method="POST", target=path, headers=headers))
    try:
        stream = await trio.open_tcp_stream(_HOST, port)
    except OSError as error:
        answer.broken = f"not connected: {error}"
        return
    async with stream:
        with suppress(trio.BrokenResourceError):  # what the server has said before it closed may be there to be read
            await stream.send_all(request + connection.send(h11.Data(content)) + connection.send(h11.EndOfMessage()))
        try:
            while not answer.complete:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await stream.receive_some())
                elif isinstance(event, h11.Response):
                    answer.status = event.status_code
                elif isinstance(event, h11.Data):
                    if count := answer.add(bytes(event.data)):
                        on_tokens(count)
                elif isinstance(event, h11.EndOfMessage):
                    answer.complete = True
        except (trio.BrokenResourceError, h11.RemoteProtocolError) as error:
            answer.broken = f"{type(error).__name__}: {error}"


def document(answer: Answer) -> dict:
    """The JSON of an answer that is no stream; empty if it is none."""
    with suppress(ValueError):
        found = json.loads(answer.rest)
        if isinstance(found, dict):
            return found
    return {}
