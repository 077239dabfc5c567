import json

import httpx
import openai
import pytest
import trio

from pdserve.wire.messages import Delta, TokenLogprob

pytestmark = pytest.mark.trio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


async def stream(server, path, **body):
    """The events of a stream; the last must be [DONE]."""
    reply = await server.client.post(path, json={"stream": True, **body})
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_completion_document(server):
    reply = await server.client.post(COMPLETIONS, json={"prompt": "a"})
    document = reply.json()
    assert document.pop("id").startswith("cmpl-")
    assert document.pop("created") > 1_700_000_000
    assert document == {
        "object": "text_completion",
        "model": "sim-bytes",
        "choices": [
            {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None},
        ],
        "usage": {
            "prompt_tokens": 11,
            "completion_tokens": 5,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert reply.headers["content-length"] == str(len(reply.content))


async def test_completion_stream_with_ids_and_usage(server):
    body = {"prompt": "a", "return_token_ids": True, "stream_options": {"include_usage": True}}
    first, second, usage = await stream(server, COMPLETIONS, **body)
    assert first["choices"] == [
        {
            "index": 0,
            "text": "hel",
            "logprobs": None,
            "finish_reason": None,
            "token_ids": list(b"hel"),
            "start_index": 0,
        }
    ]
    assert second["choices"][0]["start_index"] == 3
    assert second["choices"][0]["finish_reason"] == "stop"
    assert first["id"] == second["id"] == usage["id"]
    assert first["usage"] is None
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)


async def test_a_document_carries_ids_on_request(server):
    document = (await server.client.post(COMPLETIONS, json={"prompt": "a", "return_token_ids": True})).json()
    assert (document["choices"][0]["token_ids"], document["choices"][0]["start_index"]) == (list(b"hello"), 0)


async def test_a_stream_without_options_has_neither(server):
    first, second = await stream(server, COMPLETIONS, prompt="a")
    assert "usage" not in first
    assert "token_ids" not in first["choices"][0]
    assert second["choices"][0]["text"] == "lo"


async def test_chat_stream_begins_with_the_role(server):
    role, first, second = await stream(server, CHAT, messages=MESSAGES)
    assert role["object"] == "chat.completion.chunk"
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (first["choices"][0]["delta"], second["choices"][0]["delta"]) == ({"content": "hel"}, {"content": "lo"})
    assert [chunk["choices"][0]["finish_reason"] for chunk in (role, first, second)] == [None, None, "stop"]


async def test_held_back_text_makes_no_chunk_but_its_ids_do(server):
    held = [
        Delta("r", 0, 0, (1, 2)),
        Delta("r", 0, 2, (3,), "abc"),
        Delta("r", 0, 3, (), finish="length", stop_reason="x"),
    ]
    server.master.script = list(held)
    assert len(await stream(server, COMPLETIONS, prompt="a")) == 2
    role, text, finish = await stream(server, CHAT, messages=MESSAGES)
    assert (role["choices"][0]["delta"]["role"], text["choices"][0]["delta"]) == ("assistant", {"content": "abc"})
    assert (finish["choices"][0]["delta"], finish["choices"][0]["stop_reason"]) == ({}, "x")
    chunks = await stream(server, COMPLETIONS, prompt="a", return_token_ids=True)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[1, 2], [3], []]


async def test_completion_logprobs(server):
    euro = "€".encode()
    logprobs = (
        TokenLogprob(97, -0.25, ((97, -0.25), (98, float("-inf")))),
        TokenLogprob(euro[0], -1.0, ((97, -0.5),)),
        TokenLogprob(euro[1], -1.0),
        TokenLogprob(euro[2], -1.0),
        TokenLogprob(256, -2.0),
    )
    ids = tuple(one.token_id for one in logprobs)
    server.master.script = [Delta("r", 0, 0, ids, "a€", logprobs, finish="stop")]
    document = (await server.client.post(COMPLETIONS, json={"prompt": "a", "logprobs": 2})).json()
    assert document["choices"][0]["logprobs"] == {
        "tokens": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<|eos|>"],
        "token_logprobs": [-0.25, -1.0, -1.0, -1.0, -2.0],
        "top_logprobs": [
            {"a": -0.25, "b": -9999.0},
            {"a": -0.5, "bytes:\\xe2": -1.0},
            {"bytes:\\x82": -1.0},
            {"bytes:\\xac": -1.0},
            {"<|eos|>": -2.0},
        ],
        "text_offset": [0, 1, 1, 1, 2],
    }


async def test_text_offsets_go_on_from_chunk_to_chunk(server, words):
    server.master.script = words("ab", "c", logprobs=True)
    chunks = await stream(server, COMPLETIONS, prompt="a", logprobs=1)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0, 1], [2]]


async def test_chat_logprobs(server, words):
    server.master.script = words("a", logprobs=True)
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    document = (await server.client.post(CHAT, json=body)).json()
    assert document["choices"][0]["message"] == {"role": "assistant", "content": "a", "refusal": None}
    assert document["choices"][0]["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -9999.0, "bytes": [98]},
            ],
        }
    ]
    server.master.script = words("a", logprobs=True)
    role, only = await stream(server, CHAT, **body)
    assert role["choices"][0]["logprobs"] is None
    assert only["choices"][0]["logprobs"]["content"][0]["bytes"] == [97]


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_openai_client_understands_it(server, streaming, words):
    server.master.script = ClientScript(words)

    def talk():
        transport = httpx.Client(trust_env=False)
        with openai.OpenAI(
            base_url=f"{server.base_url}/v1", api_key="k", max_retries=0, timeout=10, http_client=transport
        ) as client:
            chat = {"model": "sim-bytes", "messages": MESSAGES}
            if not streaming:
                message = client.chat.completions.create(**chat).choices[0].message.content
                text = client.completions.create(model="sim-bytes", prompt="a").choices[0].text
                return message, text, [model.id for model in client.models.list()]
            with client.chat.completions.create(**chat, stream=True) as chunks:
                message = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            with client.completions.create(
                model="sim-bytes", prompt="a", stream=True, stream_options={"include_usage": True}
            ) as chunks:
                got = list(chunks)
            assert got[-1].usage.total_tokens == 16
            text = "".join(chunk.choices[0].text for chunk in got[:-1])
            return message, text, [client.models.retrieve("sim-bytes").id]

    assert await trio.to_thread.run_sync(talk) == ("hello", "hello", ["sim-bytes"])


class ClientScript:
    """The same words for each request."""

    def __init__(self, words):
        self._words = words

    def __iter__(self):
        return iter(self._words("hel", "lo"))
