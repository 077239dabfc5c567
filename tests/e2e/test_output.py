"""What the embedded model says through Prefill and Decode is what it says on its own."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

REFERENCE = json.loads((Path(__file__).parents[1] / "engine" / "torch_engine" / "reference.json").read_text())
TIE = 1e-3
MAX_TIES = 2
PROMPTS = ["The sea is", "🎉🎊🥳 emoji: 🎉🎊", "北京是中国的首都，"]


def test_greedy_output_equals_the_reference_cold_and_cached(service):
    """Ties of the two best logits may fall either way, as in the test of the engine alone."""
    cases = [case for case in REFERENCE["prompts"] if len(case["ids"]) <= 130]

    def differs(case: dict) -> bool:
        stream = service.stream(case["ids"], max_tokens=10, ignore_eos=True)
        pairs = zip(stream.ids, case["output"], case["gaps"], strict=False)
        gap = next((gap for got, wanted, gap in pairs if got != wanted), None)
        assert len(stream.ids) == 10
        assert gap is None or gap < TIE, f"{case['name']}: {stream.ids} is not {case['output'][:10]}"
        return gap is not None

    with ThreadPoolExecutor(8) as pool:
        for _ in ("cold", "cached"):
            assert sum(pool.map(differs, cases)) <= MAX_TIES


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_prompts_around_page_borders_say_the_same_with_and_without_cache(service, length):
    prompt = [(7 * i + 13 * length) % 30000 + 100 for i in range(length)]
    cold, cached = (service.stream(prompt, max_tokens=8, ignore_eos=True) for _ in range(2))
    assert len(cold.ids) == 8
    assert cached.ids == cold.ids
    assert cold.usage["prompt_tokens_details"]["cached_tokens"] == 0
    # The last token of a prompt is always computed: its logits are wanted.
    assert cached.usage["prompt_tokens_details"]["cached_tokens"] == (length - 1) // 16 * 16
    assert cached.usage["prompt_tokens"] == length


@pytest.mark.parametrize(
    "extra",
    [{}, {"stop": ["\n", " and", "。"]}, {"max_tokens": 1}, {"temperature": 0.8, "seed": 7}],
    ids=["greedy", "stop", "one", "seeded"],
)
@pytest.mark.parametrize("prompt", PROMPTS, ids=["en", "emoji", "zh"])
def test_streamed_and_whole_text_are_the_same_string(service, prompt, extra):
    whole = service.complete(prompt, **{"max_tokens": 12, **extra})
    stream = service.stream(prompt, **{"max_tokens": 12, **extra})
    choice = whole["choices"][0]
    assert stream.text == choice["text"]
    assert stream.done
    assert stream.finish == [choice["finish_reason"]]
    assert stream.usage["completion_tokens"] == whole["usage"]["completion_tokens"] == len(stream.ids)
    for stop in extra.get("stop", ()):
        assert stop not in choice["text"]


def test_a_stop_string_that_spans_tokens_never_shows_its_beginning(service):
    """The stop string is cut from the middle of what the model says."""
    whole = service.complete("The sea is", max_tokens=12)["choices"][0]["text"]
    for begin in range(4, 12, 3):
        stop = whole[begin : begin + 6]
        stream = service.stream("The sea is", max_tokens=12, stop=stop)
        assert stream.text == whole[: whole.index(stop)]
        assert stream.finish == ["stop"]
        assert stream.done


def test_a_character_of_several_tokens_comes_in_one_piece(service):
    stream = service.stream("Repeat: 🥳🎊🥳🎊🥳🎊🥳🎊🥳🎊", max_tokens=32, ignore_eos=True)
    assert len(stream.ids) == 32
    assert "�" not in "".join(choice["text"] for choice in stream.choices[:-2])
