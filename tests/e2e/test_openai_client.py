"""The public `openai` client against the running service."""

import openai
import pytest

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_names_the_capital_of_france(service, client):
    answer = client.chat.completions.create(model=service.model, messages=QUESTION, max_tokens=40, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens > 10
    assert answer.usage.completion_tokens > 3


def test_chat_streamed_is_the_same_string(service, client):
    options = {"model": service.model, "messages": QUESTION, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.choices[0].finish_reason]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
    logprobs = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    assert len(logprobs) == whole.usage.completion_tokens
    for entry in logprobs:  # greedy: the chosen token is the best one
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert entry.top_logprobs[1].logprob <= entry.logprob


def test_completion_with_logprobs_whole_and_streamed(service, client):
    options = {"model": service.model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**options)
    choice = whole.choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
    assert (len(choice.logprobs.tokens), whole.usage.completion_tokens, choice.finish_reason) == (12, 12, "length")
    streamed = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(chunk.text for chunk in streamed) == choice.text
    logprobs = [value for chunk in streamed if chunk.logprobs for value in chunk.logprobs.token_logprobs]
    assert logprobs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)


def test_models_and_an_unknown_one(service, client):
    assert [model.id for model in client.models.list()] == [service.model]
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="hi", max_tokens=1)
    assert caught.value.param == "model"


def test_three_choices_share_the_prompt_and_say_what_each_would_say_alone(service, client):
    """Greedy: every choice is the answer of n = 1, so the copied page holds the prompt's KV."""
    greedy = {"model": service.model, "messages": QUESTION, "max_tokens": 10, "temperature": 0}
    alone = client.chat.completions.create(**greedy)
    together = client.chat.completions.create(**greedy, n=3)
    assert [choice.message.content for choice in together.choices] == [alone.choices[0].message.content] * 3
    assert together.usage.completion_tokens == 3 * alone.usage.completion_tokens
    assert together.usage.prompt_tokens == alone.usage.prompt_tokens
    sampled = {**greedy, "temperature": 1.0, "seed": 4, "n": 3}
    whole = client.chat.completions.create(**sampled)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) > 1
    streamed = dict.fromkeys(texts, "")
    for chunk in client.chat.completions.create(**sampled, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    service.wait_quiet()
