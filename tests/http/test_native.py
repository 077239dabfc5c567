import json

import pytest

from pdserve.wire.messages import Delta, TokenLogprob

pytestmark = pytest.mark.trio


async def test_generate_document(server, words):
    server.master.script = words("hel", "lo", logprobs=True)
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 9, "return_details": True}}
    document = (await server.client.post("/generate", json=body)).json()
    assert document["generated_text"] == ["hello"]
    assert (document["count_output_tokens"], document["prompt_tokens"], document["finish_reason"]) == (5, 11, "stop")
    assert [token["id"] for token in document["tokens"]] == list(b"hello")
    assert document["tokens"][4] == {
        "id": 111,
        "text": "lo",
        "logprob": -0.5,
        "special": False,
        "count_output_tokens": 5,
        "index": 4,
    }


async def test_generate_is_greedy_unless_told_to_sample(server):
    await server.client.post("/generate", json={"inputs": "abc"})
    parameters = {"do_sample": True, "temperature": 0.7, "stop_sequences": "x", "min_new_tokens": 3, "top_k": -1}
    await server.client.post("/generate", json={"inputs": [1, 2], "parameters": parameters})
    greedy, sampled = (request.params for request in server.master.requests)
    assert (greedy.temperature, greedy.max_tokens, greedy.logprobs) == (0.0, 16, 0)
    assert (sampled.temperature, sampled.stop, sampled.min_tokens, sampled.top_k) == (0.7, ("x",), 3, 0)
    assert server.master.requests[1].prompt_ids == (1, 2)


async def test_stream_has_one_event_a_token_and_no_other(server):
    server.master.script = [
        Delta("r", 0, 0, (104, 105), "hi", (TokenLogprob(104, -0.1), TokenLogprob(105, -0.2))),
        Delta("r", 0, 2, (256,), "", (TokenLogprob(256, -0.3),), finish="stop"),
    ]
    reply = await server.client.post("/generate_stream", json={"inputs": "abc"})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, rest = reply.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data:{") for event in events)
    events = [json.loads(event.removeprefix("data:")) for event in events]
    assert [event["token"]["index"] for event in events] == [0, 1, 2]
    assert [event["token"]["text"] for event in events] == ["", "hi", ""]
    assert [event["finished"] for event in events] == [False, False, True]
    assert events[2] == {
        "token": {
            "id": 256,
            "text": "",
            "logprob": -0.3,
            "special": True,
            "count_output_tokens": 3,
            "prompt_tokens": 11,
            "index": 2,
        },
        "generated_text": None,
        "finished": True,
        "finish_reason": "stop",
        "details": None,
    }


async def test_a_finish_without_a_token_is_an_event_without_id(server, words):
    server.master.script = [*words("ab", finish=None), Delta("r", 0, 2, finish="length")]
    reply = await server.client.post("/generate_stream", json={"inputs": "abc"})
    last = json.loads(reply.text.split("\n\n")[-2].removeprefix("data:"))
    assert (last["token"]["id"], last["token"]["count_output_tokens"], last["finish_reason"]) == (None, 2, "length")


async def test_a_document_of_several_choices_has_lists(server, words, interleaved):
    server.master.script = interleaved(words("a", "b", "c", choice=1, finish="length"), words("hi", choice=0))
    body = {"inputs": "abc", "parameters": {"n": 2, "return_details": True}}
    document = (await server.client.post("/generate", json=body)).json()
    tokens = document.pop("tokens")
    assert document == {
        "generated_text": ["hi", "abc"],
        "count_output_tokens": [2, 3],
        "finish_reason": ["stop", "length"],
        "prompt_tokens": 11,
    }
    assert [[(token["id"], token["index"]) for token in choice] for choice in tokens] == [
        [(104, 0), (105, 1)],
        [(97, 0), (98, 1), (99, 2)],
    ]


async def test_the_best_one_choice_looks_like_the_only_one(server, words, interleaved):
    server.master.script = interleaved(
        words("bad", choice=0, logprobs=True, logprob=-2.0), words("hi", choice=1, logprobs=True, logprob=-0.1)
    )
    body = {"inputs": "abc", "parameters": {"best_of": 2, "return_details": True}}
    document = (await server.client.post("/generate", json=body)).json()
    assert (document["generated_text"], document["count_output_tokens"], document["finish_reason"]) == (
        ["hi"],
        2,
        "stop",
    )
    assert [token["logprob"] for token in document["tokens"]] == [-0.1, -0.1]
    assert server.master.requests[0].n == 2


async def test_events_of_several_choices_name_theirs(server, words, interleaved):
    server.master.script = interleaved(words("a", "b", choice=1), words("c", choice=0, finish="length"))
    reply = await server.client.post("/generate_stream", json={"inputs": "abc", "parameters": {"n": 2}})
    events = [json.loads(event.removeprefix("data:")) for event in reply.text.split("\n\n")[:-1]]
    told = [
        (event["choice"], event["token"]["index"], event["token"]["text"], event["finish_reason"]) for event in events
    ]
    assert told == [(1, 0, "a", None), (0, 0, "c", "length"), (1, 1, "b", "stop")]
    assert [event["token"]["count_output_tokens"] for event in events] == [1, 1, 2]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("inputs", {}),
        ("inputs", {"inputs": "x" * 1000}),
        ("parameters", {"inputs": "a", "parameters": [1]}),
        ("parameters.max_new_tokens", {"inputs": "a", "parameters": {"max_new_tokens": 0}}),
        ("parameters.max_new_tokens", {"inputs": "a", "parameters": {"max_new_tokens": 1000}}),
        ("parameters.best_of", {"inputs": "a", "parameters": {"best_of": 5}}),
        ("parameters.stop_sequences", {"inputs": "a", "parameters": {"stop_sequences": 5}}),
        ("parameters.do_sample", {"inputs": "a", "parameters": {"do_sample": "no"}}),
    ],
)
async def test_a_bad_parameter_is_named(server, param, body):
    for path in ("/generate", "/generate_stream"):
        reply = await server.client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_tokenize_and_back(server):
    tokens = (await server.client.post("/tokenize", json={"prompt": "hé<|im_end|>"})).json()
    assert tokens == {"tokens": [104, 195, 169, 258], "count": 4, "max_model_len": 1000}
    text = (await server.client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "hé<|im_end|>"}


async def test_tokenize_messages(server):
    body = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    tokens = (await server.client.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == [257, *b"user\na", 258, 10]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_tokenizer_errors(server, path, body, param):
    reply = await server.client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_model_without_a_chat_template_says_so(running):
    async with running(template=False) as server:
        body = {"messages": [{"role": "user", "content": "a"}]}
        reply = await server.client.post("/v1/chat/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
