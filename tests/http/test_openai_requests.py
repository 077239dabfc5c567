import pytest

from pdserve.wire.messages import ModelCard

pytestmark = pytest.mark.trio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", ""),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [""]),
        ("prompt", ["a", "b"]),
        ("prompt", [[1], [2]]),
        ("prompt", [1, "a"]),
        ("prompt", [True]),
        ("prompt", [1.5]),
        ("prompt", 3),
        ("prompt", {"a": 1}),
        ("prompt", [259]),
        ("prompt", [-1]),
        ("prompt", [10**30]),
        ("prompt", "x" * 1000),
        ("model", 7),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", 1000),
        ("n", 0),
        ("n", 5),
        ("best_of", 5),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.0),
        ("stop", [1]),
        ("stop", ""),
        ("stop", list("abcde")),
        ("stop", {"a": 1}),
        ("stop", "x" * 2000),
        ("stop_token_ids", [259]),
        ("stop_token_ids", "a"),
        ("stop_token_ids", [1] * 129),
        ("seed", 1.5),
        ("seed", 2**64),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10**400),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("ignore_eos", 1),
        ("echo", True),
        ("suffix", "x"),
        ("logit_bias", {"5": 1}),
        ("stream", "yes"),
        ("stream_options", {}),
        ("return_token_ids", 1),
    ],
)
async def test_a_bad_completion_parameter_is_named(server, param, value):
    reply = await server.client.post(COMPLETIONS, json={"prompt": "a", param: value})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"]
    assert not server.master.requests


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("messages", None),
        ("messages", []),
        ("messages", "hi"),
        ("messages", ["hi"]),
        ("messages", [{"content": "hi"}]),
        ("messages", [{"role": 1, "content": "hi"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": "x" * 1000}]),
        ("max_tokens", 1000),
        ("max_completion_tokens", 999),
        ("max_completion_tokens", 0),
        ("logprobs", 5),
        ("top_logprobs", 2),
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", "text"),
    ],
)
async def test_a_bad_chat_parameter_is_named(server, param, value):
    reply = await server.client.post(CHAT, json={"messages": MESSAGES, param: value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not server.master.requests


async def test_nested_parameters_are_named_with_their_path(server):
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}
    reply = await server.client.post(COMPLETIONS, json=body)
    assert reply.json()["error"]["param"] == "stream_options.include_usage"
    reply = await server.client.post(
        CHAT, json={"messages": MESSAGES, "logprobs": True, "top_logprobs": 21, "stream": True}
    )
    assert reply.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"a"', b"\xff", b"[" * 100_000, b'{"prompt": NaN}', b'{"a":1e999}']
)
async def test_a_body_that_is_no_json_object_is_refused(server, body):
    reply = await server.client.post(COMPLETIONS, content=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_an_unknown_model_is_not_found(server):
    reply = await server.client.post(COMPLETIONS, json={"prompt": "a", "model": "gpt-\u2603"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_everything_given_reaches_the_master(server):
    body = {
        "model": "sim-bytes",
        "prompt": [1, 2, 258],
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": -1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "logprobs": 3,
        "n": 1,
        "best_of": 1,
        "echo": False,
        "logit_bias": {},
        "user": "ignored",
        "no_such_field": [1],
    }
    reply = await server.client.post(COMPLETIONS, json=body, headers={"x-request-id": "label-1"})
    assert reply.status_code == 200
    (request,) = server.master.requests
    assert (request.prompt_ids, request.label, request.n) == ((1, 2, 258), "label-1", 1)
    params = request.params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p, params.top_k) == (
        9,
        2,
        0.5,
        0.9,
        40,
    )
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.logprobs) == (("a", "b"), (3,), True, 3)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.25, -0.25)
    assert 0 <= params.seed < 2**63


async def test_defaults(server):
    for _ in range(2):
        await server.client.post(COMPLETIONS, json={"prompt": "abc", "top_k": -1, "stop": None, "stream": None})
    first, second = server.master.requests
    assert first.prompt_ids == tuple(b"abc")
    assert (first.params.max_tokens, first.params.temperature, first.params.top_k) == (16, 1.0, 0)
    assert (first.params.logprobs, first.params.stop) == (None, ())
    assert first.params.seed != second.params.seed


async def test_a_default_length_shrinks_to_what_is_left(server):
    await server.client.post(COMPLETIONS, json={"prompt": "x" * 995})
    await server.client.post(COMPLETIONS, json={"prompt": "x" * 995, "max_tokens": 5})
    assert [request.params.max_tokens for request in server.master.requests] == [5, 5]


async def test_chat_fills_the_context_unless_told_otherwise(server):
    await server.client.post(CHAT, json={"messages": MESSAGES})
    await server.client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 7})
    first, second = server.master.requests
    assert first.params.max_tokens == 1000 - len(first.prompt_ids)
    assert second.params.max_tokens == 7


async def test_chat_is_rendered_and_control_tokens_become_ids(server):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]
    body = {"messages": messages, "response_format": {"type": "text"}, "tools": [], "logprobs": True}
    await server.client.post(CHAT, json=body)
    (request,) = server.master.requests
    assert request.params.logprobs == 0
    turns = [b"system\nbe brief", b"user\nab", b"assistant\n"]
    expected = [i for turn in turns for i in (257, *turn, 258, 10)] + [257, *b"assistant\n"]
    assert list(request.prompt_ids) == expected


async def test_a_long_prompt_is_tokenised_the_same(server):
    server.master.card = ModelCard("sim-bytes", "w", "v", 200_000)
    text = "é" * 60_000
    await server.client.post(COMPLETIONS, json={"prompt": [text]})
    assert server.master.requests[0].prompt_ids == tuple(text.encode())
