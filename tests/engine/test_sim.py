import ctypes

import numpy as np
import pytest

from pdserve.engine.base import Sample, StepPlan, Work
from pdserve.engine.sim import SimEngine, expected_tokens
from pdserve.errors import ConfigError
from pdserve.wire.messages import ModelCard, SamplingParams

EOS = frozenset({2})
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def make(num_pages=16, page_size=4, vocab_size=1000, eos=EOS):
    return SimEngine(
        card=ModelCard("sim", "w", "v", max_len=64),
        vocab_size=vocab_size,
        eos_token_ids=eos,
        num_pages=num_pages,
        page_size=page_size,
        prefill_tokens_per_s=1000.0,
        decode_ms=50.0,
    )


def prefill(engine, tokens, pages, start=0, params=GREEDY, **sample):
    """One step over tokens[start:] that samples; returns the Sampled."""
    work = Work(tokens[start:], start, pages, (Sample(params, tokens, len(tokens), **sample),))
    ((sampled,),) = engine.step(StepPlan((work,))).tokens
    return sampled


def generate(engine, prompt, pages, params):
    tokens = [*prompt, prefill(engine, prompt, pages, params=params).token_id]
    while len(tokens) < len(prompt) + params.max_tokens:
        work = Work(tokens[-1:], len(tokens) - 1, pages, (Sample(params, tokens, len(prompt)),))
        ((sampled,),) = engine.step(StepPlan((work,))).tokens
        tokens.append(sampled.token_id)
    return tokens[len(prompt) :]


PROMPT = list(range(40, 51))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=9, max_tokens=8)])
def test_output_is_the_expected_one(params):
    got = generate(make(), PROMPT, [9, 3, 5, 0, 1], params)
    assert got == expected_tokens(PROMPT, params, eos=EOS)
    assert all(32 <= token < 127 for token in got)


def test_chunks_and_a_resumed_prefix_change_nothing():
    engine = make()
    pages = [2, 7, 4]
    engine.step(StepPlan((Work(PROMPT[:4], 0, pages),)))
    engine.step(StepPlan((Work(PROMPT[4:9], 4, pages),)))
    assert prefill(engine, PROMPT, pages, start=9).token_id == expected_tokens(PROMPT, GREEDY)[0]
    assert prefill(engine, PROMPT, [2, 7, 11], start=8).token_id == expected_tokens(PROMPT, GREEDY)[0]


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_damaged_page_changes_the_output(page):
    engine = make()
    params = SamplingParams(temperature=0.0, max_tokens=4)
    prefill(engine, PROMPT, [0, 1, 2])
    engine.memory.owner[page * 32 : page * 32 + 8] ^= 0x55
    longer = [*PROMPT, 60]
    got = [prefill(engine, [*longer, i], [0, 1, 2, 3], start=11).token_id for i in range(50, 58)]
    assert got != [expected_tokens([*longer, i], params)[0] for i in range(50, 58)]


def test_swapped_pages_change_the_output():
    engine = make()
    prefill(engine, PROMPT, [0, 1, 2])
    right = [prefill(engine, [*PROMPT, i], [0, 1, 2], start=11).token_id for i in range(50, 58)]
    wrong = [prefill(engine, [*PROMPT, i], [1, 0, 2], start=11).token_id for i in range(50, 58)]
    assert right == [expected_tokens([*PROMPT, i], GREEDY)[0] for i in range(50, 58)]
    assert wrong != right


def test_pages_can_be_moved_to_another_engine():
    source, target = make(), make()
    prefill(source, PROMPT, [4, 5, 6])
    nbytes = source.memory.page_bytes
    for src, dst in [(4, 9), (5, 0), (6, 3)]:
        ctypes.memmove(target.memory.address + dst * nbytes, source.memory.address + src * nbytes, nbytes)
    assert prefill(target, [*PROMPT, 50], [9, 0, 3], start=11).token_id == expected_tokens([*PROMPT, 50], GREEDY)[0]


def test_copies_come_before_the_work():
    engine = make()
    prefill(engine, PROMPT, [0, 1, 2])
    longer = [*PROMPT, 33]
    work = Work([33], 11, [0, 1, 8], (Sample(GREEDY, longer, 12),))
    ((sampled,),) = engine.step(StepPlan((work,), copies=((2, 8),))).tokens
    assert sampled.token_id == expected_tokens(longer, GREEDY)[0]


def test_memory_is_one_aligned_range():
    engine = make(num_pages=5, page_size=4)
    memory = engine.memory
    assert (memory.nbytes, memory.page_bytes, memory.device) == (5 * 32, 32, "cpu")
    assert memory.address % 64 == 0
    assert engine.layout.page_bytes == 32
    prefill(engine, PROMPT, [4, 0, 1])
    assert np.frombuffer(ctypes.string_at(memory.address + 4 * 32, 32), dtype=np.uint64).all()
    assert not ctypes.string_at(memory.address + 2 * 32, 32).strip(b"\0")


@pytest.mark.parametrize(("num_pages", "size"), [(1 << 52, "134217728 GiB"), (1 << 70, r"\d+ GiB")])
def test_memory_that_is_not_there_names_the_flag(num_pages, size):
    with pytest.raises(ConfigError, match=f"--kv-tokens {num_pages * 4} needs {size}"):
        make(num_pages=num_pages)


def test_token_4_asks_for_the_end():
    prompt = [40, 41, 4]
    assert prefill(make(), prompt, [0]).token_id == 2
    assert expected_tokens(prompt, GREEDY, eos=EOS) == [2]
    banned = prefill(make(), prompt, [0], banned=(2,)).token_id
    assert banned != 2
    params = SamplingParams(temperature=0.0, max_tokens=3, min_tokens=1)
    expected = expected_tokens(prompt, params, eos=EOS)
    assert (expected[0], len(expected)) == (banned, 3)
    ignoring = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    assert expected_tokens(prompt, ignoring, eos=EOS)[0] == 2
    assert len(expected_tokens(prompt, ignoring, eos=EOS)) == 3
    assert prefill(make(eos=frozenset()), prompt, [0]).token_id >= 32


def test_expected_tokens_ends_where_a_sequence_does():
    free = expected_tokens(PROMPT, GREEDY)
    stop = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(free[2],))
    assert expected_tokens(PROMPT, stop) == free[: free.index(free[2]) + 1]
    assert expected_tokens(PROMPT, GREEDY, max_seq_len=14) == free[:3]


def test_temperature_brings_seed_choice_and_position_in():
    def outputs(**params):
        return expected_tokens(PROMPT, SamplingParams(max_tokens=8, **params))

    assert outputs(temperature=0.0, seed=1) == outputs(temperature=0.0, seed=2)
    assert outputs(seed=1) != outputs(seed=2)
    params = SamplingParams(max_tokens=8)
    assert expected_tokens(PROMPT, params, choice=0) != expected_tokens(PROMPT, params, choice=1)
    assert expected_tokens(PROMPT, GREEDY, choice=0) == expected_tokens(PROMPT, GREEDY, choice=1)


def test_banned_ids_are_avoided():
    free = prefill(make(), PROMPT, [0, 1, 2]).token_id
    banned = tuple(i for i in range(32, 127) if i != 100)
    assert prefill(make(), PROMPT, [0, 1, 2], banned=banned).token_id == 100
    assert prefill(make(), PROMPT, [0, 1, 2], banned=(free,)).token_id != free
    assert prefill(make(), PROMPT, [0, 1, 2], banned=tuple(range(1000))).token_id == free, "a total ban is void"


def test_small_vocabularies():
    assert 32 <= prefill(make(vocab_size=40), PROMPT, [0, 1, 2]).token_id < 40
    assert prefill(make(vocab_size=3), [0, 1, 1], [0]).token_id in (0, 1)


def test_logprobs_are_plausible():
    params = SamplingParams(temperature=0.0, logprobs=3)
    sampled = prefill(make(), PROMPT, [0, 1, 2], params=params)
    assert sampled.logprob.token_id == sampled.token_id
    assert sampled.logprob.logprob == -0.1
    assert sampled.logprob.top[0] == (sampled.token_id, -0.1)
    assert len({i for i, _ in sampled.logprob.top}) == 3
    assert sum(np.exp(p) for _, p in sampled.logprob.top) < 1.0
    none = prefill(make(), PROMPT, [0, 1, 2], params=SamplingParams(temperature=0.0, logprobs=0))
    assert none.logprob.top == ()


def test_duration_is_prefill_by_tokens_and_decode_by_step():
    engine = make()
    chunk = Work(PROMPT[:8], 0, [0, 1, 2])
    assert engine.step(StepPlan((chunk,))).duration == pytest.approx(0.008)
    prefill(engine, PROMPT, [0, 1, 2])
    longer = [*PROMPT, 50]
    decode = Work([50], 11, [0, 1, 2], (Sample(GREEDY, longer, 11),))
    assert engine.step(StepPlan((decode, decode))).duration == pytest.approx(0.05)
    assert engine.step(StepPlan((decode, Work(PROMPT, 0, [3, 4, 5])))).duration == pytest.approx(0.061)
    assert engine.step(StepPlan(())).duration == 0.0


def test_sequences_beyond_the_cards_length_still_work():
    prompt = [33 + i % 90 for i in range(200)]
    pages = list(range(50))
    assert prefill(make(num_pages=50), prompt, pages).token_id == expected_tokens(prompt, GREEDY)[0]


def test_a_closed_engine_refuses():
    engine = make()
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step(StepPlan(()))
