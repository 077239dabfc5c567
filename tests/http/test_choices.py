import json

import httpx
import openai
import pytest
import trio

from pdserve.http.reply import Meter
from pdserve.telemetry.metrics import MasterMetrics
from pdserve.wire.messages import Delta, TokenLogprob

pytestmark = pytest.mark.trio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def body_for(path, **choices):
    """A request to `path`, with `n` and `best_of` where that endpoint wants them."""
    if path.startswith("/generate"):
        return {"inputs": "a", "parameters": choices}
    return {**({"messages": MESSAGES} if path == CHAT else {"prompt": "a"}), **choices}


async def chunks_of(server, path, body):
    """The chunks of a stream that ends with [DONE]."""
    reply = await server.client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def by_index(chunks):
    """The choices of all chunks, by index."""
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate", "/generate_stream"])
@pytest.mark.parametrize(
    ("param", "choices", "told"),
    [
        ("n", {"n": 0}, "1 to 128"),
        ("n", {"n": -1}, "1 to 128"),
        ("n", {"n": True}, "integer"),
        ("n", {"n": 1.5}, "integer"),
        ("n", {"n": "2"}, "integer"),
        ("n", {"n": 5}, "at most 4"),
        ("n", {"n": 10**30}, "1 to 128"),
        ("n", {"n": 5, "best_of": 6}, "at most 4"),
        ("best_of", {"best_of": 0}, "1 to 128"),
        ("best_of", {"best_of": [2]}, "integer"),
        ("best_of", {"n": 3, "best_of": 2}, "3 to 128"),
        ("best_of", {"n": 2, "best_of": 5}, "at most 4"),
    ],
)
async def test_a_wrong_number_of_choices_is_named(server, path, param, choices, told):
    reply = await server.client.post(path, json=body_for(path, **choices))
    error = reply.json()["error"]
    prefix = "parameters." if path.startswith("/generate") else ""
    assert (reply.status_code, error["param"]) == (400, prefix + param)
    assert told in error["message"]
    assert not server.master.requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate_stream"])
async def test_a_stream_cannot_choose_the_best(server, path):
    body = body_for(path, n=2, best_of=3)
    reply = await server.client.post(path, json=body if path == "/generate_stream" else {**body, "stream": True})
    assert (reply.status_code, reply.json()["error"]["param"].removeprefix("parameters.")) == (400, "best_of")
    assert not server.master.requests


async def test_without_a_decode_node_there_is_no_limit_to_check(server):
    """The Master tells then that there are no workers."""
    server.master.max_capacity = 0
    await server.client.post(COMPLETIONS, json={"prompt": "a", "n": 128})
    assert server.master.requests[0].n == 128


async def test_best_of_choices_are_generated_with_logprobs_to_rank_them(server):
    for choices in (
        {"n": 2},
        {"n": 2, "best_of": 2},
        {"n": 2, "best_of": 4},
        {"best_of": 3},
        {"best_of": 3, "logprobs": 5},
    ):
        await server.client.post(COMPLETIONS, json={"prompt": "a", **choices})
    await server.client.post(CHAT, json={"messages": MESSAGES, "n": 2, "best_of": 3})
    asked = [(request.n, request.params.logprobs) for request in server.master.requests]
    assert asked == [(2, None), (2, None), (4, 0), (3, 0), (3, 5), (3, 0)]


async def test_a_document_has_its_choices_in_order(server, words, interleaved):
    server.master.script = interleaved(
        words("ab", "c", choice=2, finish="length", logprobs=True),
        words("x", choice=0, logprobs=True),
        words("1", "2", "3", choice=1, logprobs=True),
    )
    body = {"prompt": "a", "n": 3, "logprobs": 0, "return_token_ids": True}
    document = (await server.client.post(COMPLETIONS, json=body)).json()
    told = [(one["index"], one["text"], one["finish_reason"], one["start_index"]) for one in document["choices"]]
    assert told == [(0, "x", "stop", 0), (1, "123", "stop", 0), (2, "abc", "length", 0)]
    assert [bytes(one["token_ids"]) for one in document["choices"]] == [b"x", b"123", b"abc"]
    assert [one["logprobs"]["tokens"] for one in document["choices"]] == [["x"], ["1", "2", "3"], ["a", "b", "c"]]
    assert [one["logprobs"]["text_offset"] for one in document["choices"]] == [[0], [0, 1, 2], [0, 1, 2]]
    assert document["usage"]["completion_tokens"] == 7
    assert document["usage"]["total_tokens"] == 18


async def test_a_chat_document_has_its_choices_in_order(server, words, interleaved):
    server.master.script = interleaved(words("b", "c", choice=1), words("x", choice=0, finish="length"))
    document = (await server.client.post(CHAT, json={"messages": MESSAGES, "n": 2})).json()
    told = [(one["index"], one["message"]["content"], one["finish_reason"]) for one in document["choices"]]
    assert told == [(0, "x", "length"), (1, "bc", "stop")]


async def test_interleaved_choices_keep_their_own_positions(server, words, interleaved):
    """Both choices have half a character at the same time."""
    euro = "€".encode()
    server.master.script = [
        *interleaved(
            words("é", euro[:1], choice=1, logprobs=True, finish=None),
            words("abc", euro[:2], choice=0, logprobs=True, finish=None),
        ),
        Delta("r", 0, 3, (euro[1], euro[2]), "€", _logprobs(euro[1:]), choice=1),
        Delta("r", 0, 5, (euro[2],), "€", _logprobs(euro[2:]), finish="length", choice=0),
        Delta("r", 0, 5, (33,), "!", _logprobs(b"!"), finish="stop", choice=1),
    ]
    body = {"prompt": "a", "n": 2, "logprobs": 0, "return_token_ids": True, **USAGE}
    *chunks, usage = await chunks_of(server, COMPLETIONS, body)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [1, 0, 1, 0, 1, 0, 1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = by_index(chunks)
    offsets = {index: [one["logprobs"]["text_offset"] for one in all_] for index, all_ in choices.items()}
    assert offsets == {1: [[0, 0], [1], [1, 1], [2]], 0: [[0, 1, 2], [3, 3], [3]]}
    assert {index: [one["start_index"] for one in all_] for index, all_ in choices.items()} == {
        1: [0, 2, 3, 5],
        0: [0, 3, 5],
    }
    assert {index: "".join(one["text"] for one in all_) for index, all_ in choices.items()} == {1: "é€!", 0: "abc€"}
    assert {index: all_[-1]["finish_reason"] for index, all_ in choices.items()} == {1: "stop", 0: "length"}
    assert (usage["choices"], usage["usage"]["completion_tokens"], usage["usage"]["prompt_tokens"]) == ([], 12, 11)


def _logprobs(ids):
    return tuple(TokenLogprob(i, -0.5) for i in ids)


async def test_each_choice_of_a_chat_stream_begins_with_the_role(server, words, interleaved):
    server.master.script = [
        Delta("r", 0, 0, (1,), choice=2),  # its text is held back
        *interleaved(words("b", "c", choice=1), words("x", choice=0)),
        Delta("r", 0, 1, (2,), "z", finish="stop", choice=2),
    ]
    choices = by_index(await chunks_of(server, CHAT, body_for(CHAT, n=3)))
    role = {"role": "assistant", "content": ""}
    assert {index: [one["delta"] for one in all_] for index, all_ in choices.items()} == {
        2: [role, {"content": "z"}],
        1: [role, {"content": "b"}, {"content": "c"}],
        0: [role, {"content": "x"}],
    }


def candidates(words, interleaved):
    """By mean logprob: 2 before 0 and 3, which are equal, before 1. By sum 1 would be first, 2 last."""
    return interleaved(
        words("aa", choice=0, logprobs=True, logprob=-0.5),
        words("b", choice=1, logprobs=True, logprob=-0.6),
        words("cccc", "cccc", choice=2, logprobs=True, logprob=-0.25, finish="length"),
        words("ddd", choice=3, logprobs=True, logprob=-0.5),
    )


async def test_the_best_are_answered_with_by_mean_logprob(server, words, interleaved):
    server.master.script = candidates(words, interleaved)
    body = {"prompt": "a", "n": 3, "best_of": 4, "return_token_ids": True}
    document = (await server.client.post(COMPLETIONS, json=body)).json()
    assert [
        (one["index"], one["text"], one["finish_reason"], len(one["token_ids"]), one["logprobs"])
        for one in document["choices"]
    ] == [(0, "cccccccc", "length", 8, None), (1, "aa", "stop", 2, None), (2, "ddd", "stop", 3, None)]
    assert document["usage"]["completion_tokens"] == 14
    assert (await server.client.get("/metrics")).text.count("pdserve_output_tokens_total 14.0") == 1


async def test_the_best_carry_logprobs_if_these_were_asked_for(server, words, interleaved):
    server.master.script = candidates(words, interleaved)
    reply = await server.client.post(COMPLETIONS, json={"prompt": "a", "best_of": 4, "logprobs": 1})
    (choice,) = reply.json()["choices"]
    assert (choice["index"], choice["text"]) == (0, "cccccccc")
    assert choice["logprobs"]["token_logprobs"] == [-0.25] * 8
    assert choice["logprobs"]["text_offset"] == list(range(8))


async def test_the_best_of_a_chat(server, words, interleaved):
    server.master.script = candidates(words, interleaved)
    document = (await server.client.post(CHAT, json={"messages": MESSAGES, "n": 2, "best_of": 4})).json()
    told = [(one["index"], one["message"]["content"], one["logprobs"]) for one in document["choices"]]
    assert told == [(0, "cccccccc", None), (1, "aa", None)]
    assert document["usage"]["completion_tokens"] == 14


async def test_a_choice_without_tokens_is_the_worst(server, words):
    server.master.script = [Delta("r", 0, 0, finish="stop"), *words("b", choice=1, logprobs=True, logprob=-90.0)]
    document = (await server.client.post(COMPLETIONS, json={"prompt": "a", "best_of": 2})).json()
    assert [one["text"] for one in document["choices"]] == ["b"]


@pytest.mark.parametrize("missing", [0, 1])
async def test_one_finished_choice_does_not_finish_the_others(server, words, missing):
    server.master.script = words("a", choice=1 - missing) + words("b", choice=missing, finish=None)
    assert (await server.client.post(COMPLETIONS, json={"prompt": "a", "n": 2})).status_code == 502
    reply = await server.client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "stream": True})
    assert "[DONE]" not in reply.text
    assert "worker_failed" in reply.text
    await server.settled(COMPLETIONS, "failed", 2)


async def test_times_between_tokens_are_those_of_a_choice(autojump_clock):
    class Counted:
        prompt_tokens, cached_tokens = 11, 4

    metrics = MasterMetrics()
    meter = Meter(metrics, COMPLETIONS, trio.current_time(), choices=2)
    for wait, choice, ids, finish in [
        (1, 0, 1, None),
        (2, 1, 1, None),
        (3, 0, 2, "stop"),
        (4, 1, 1, None),
        (0, 1, 0, "stop"),
    ]:
        await trio.sleep(wait)
        assert not meter.finished
        meter.count(Counted, Delta("r", 0, 0, (1,) * ids, finish=finish, choice=choice))
    assert meter.finished

    def value(name, **labels):
        return metrics.registry.get_sample_value(f"pdserve_{name}", labels)

    # choice 0: five seconds for two tokens; choice 1: seven for one
    assert (value("itl_seconds_count"), value("itl_seconds_sum")) == (3, 12)
    assert (value("ttft_seconds_count", endpoint=COMPLETIONS), value("ttft_seconds_sum", endpoint=COMPLETIONS)) == (
        1,
        1,
    )
    assert (value("prompt_tokens_total"), value("output_tokens_total"), meter.usage.completion) == (11, 5, 5)


class Repeated:
    """The same script for each request."""

    def __init__(self, script):
        self._script = script

    def __iter__(self):
        return iter(self._script)


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_openai_client_takes_several_choices(server, streaming, words, interleaved):
    texts = (("a", "b"), ("c",), ("d", "e", "f"))
    scripts = [words(*parts, choice=choice) for choice, parts in enumerate(texts)]
    server.master.script = Repeated(interleaved(*reversed(scripts)))

    def talk():
        transport = httpx.Client(trust_env=False)
        with openai.OpenAI(
            base_url=f"{server.base_url}/v1", api_key="k", max_retries=0, timeout=10, http_client=transport
        ) as client:
            chat = {"model": "sim-bytes", "messages": MESSAGES, "n": 3}
            plain = {"model": "sim-bytes", "prompt": "a", "n": 3}
            if not streaming:
                messages = [one.message.content for one in client.chat.completions.create(**chat).choices]
                return messages, [one.text for one in client.completions.create(**plain).choices]
            messages, said = [""] * 3, [""] * 3
            with client.chat.completions.create(**chat, stream=True) as chunks:
                for chunk in chunks:
                    messages[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            with client.completions.create(**plain, stream=True) as chunks:
                for chunk in chunks:
                    said[chunk.choices[0].index] += chunk.choices[0].text
            return messages, said

    expected = ["ab", "c", "def"]
    assert await trio.to_thread.run_sync(talk) == (expected, expected)


@pytest.mark.parametrize(("n", "most"), [(1, 300), (3, 100)])
async def test_a_chat_that_asks_for_no_length_gets_what_fits_for_all_its_choices(server, n, most):
    server.master.room = 300
    await server.client.post(CHAT, json=body_for(CHAT, n=n))
    await server.client.post(CHAT, json={**body_for(CHAT, n=n), "max_tokens": 250})
    assert [request.params.max_tokens for request in server.master.requests] == [most, 250]
