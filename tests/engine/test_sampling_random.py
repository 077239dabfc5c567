import numpy as np
import pytest

from pdserve.engine.base import Sample
from pdserve.engine.sampling import mix64, sample_from, uniform
from pdserve.wire.messages import SamplingParams


def draw(logits, history=(0,), prompt_len=1, choice=0, banned=(), dtype=np.float32, **params):
    array = np.asarray(logits, dtype=dtype)
    before = array.copy()
    sampled = sample_from(array, Sample(SamplingParams(**params), history, prompt_len, choice, banned))
    assert np.array_equal(array, before, equal_nan=True), "the logits belong to the engine"
    return sampled


def histogram(logits, n=2000, **params):
    counts = np.zeros(len(logits))
    for seed in range(n):
        counts[draw(logits, seed=seed, **params).token_id] += 1
    return counts / n


def test_the_numbers_are_fixed_for_ever():
    """P, D and a recovery on a newer version must agree, so these values may not change."""
    assert mix64(0) == 0xE220A8397B1DCDAF, "the published SplitMix64 sequence of seed 0"
    assert uniform(0, 0, 0) == 0.13870941014555427
    assert uniform(42, 1, 7) == 0.10584086659863745
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


@pytest.mark.parametrize("vary", ["seed", "choice", "position"])
def test_the_numbers_are_uniform_and_independent_along_each_axis(vary):
    base = {"seed": 7, "choice": 0, "position": 0}
    values = np.array([uniform(**{**base, vary: i}) for i in range(20_000)])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    share, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((share - 1000) ** 2 / 1000).sum() < 45, "chi-square with 19 degrees of freedom"
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert len(set(values)) == len(values)


def test_greedy_takes_the_lowest_of_equals():
    assert draw([1, 3, 3, 2], temperature=0.0).token_id == 1
    assert draw([1, 3, 3, 2], temperature=0.0, banned=(1,)).token_id == 2
    assert draw([1, 3, 3, 2], temperature=0.0, top_k=2, top_p=0.1).token_id == 1


def test_banned_ids_are_never_drawn_and_unknown_ones_ignored():
    shares = histogram([5.0, 0.0, 0.0], n=300, banned=(0, 99, -1))
    assert shares[0] == 0.0
    assert shares[1] > 0.3
    assert draw([1.0, 2.0], temperature=0.0, banned=(0, 1)).token_id == 1, "a ban on everything is void"
    assert draw([1.0, 2.0], temperature=1e-9, banned=(0, 1)).token_id == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_over_prompt_and_output():
    greedy = {"temperature": 0.0, "history": [0, 1, 77], "prompt_len": 1}
    assert draw([3.0, 2.0, 1.6], repetition_penalty=2.0, **greedy).token_id == 2
    assert draw([3.2, 1.0, 1.5], repetition_penalty=2.0, **greedy).token_id == 0
    assert draw([-1.0, -1.1, -1.9], repetition_penalty=2.0, **greedy).token_id == 2
    assert draw([-1.0, -1.1, -2.1], repetition_penalty=2.0, **greedy).token_id == 0


def test_presence_and_frequency_count_the_output_only():
    greedy = {"temperature": 0.0, "history": [0, 0, 0, 1, 1, 2], "prompt_len": 3}
    assert draw([3.0, 3.9, 1.0], presence_penalty=1.0, **greedy).token_id == 0
    assert draw([3.0, 4.1, 1.0], presence_penalty=1.0, **greedy).token_id == 1
    assert draw([3.0, 4.9, 3.9], frequency_penalty=1.0, **greedy).token_id == 0
    assert draw([2.0, 4.9, 3.9], frequency_penalty=1.0, **greedy).token_id == 1
    assert draw([2.0, 4.9, 3.95], frequency_penalty=1.0, **greedy).token_id == 2
    assert draw([2.0, 1.0, 0.0], presence_penalty=1.0, temperature=0.0, history=[0], prompt_len=1).token_id == 0


def test_logprobs_are_those_of_the_raw_distribution():
    logits = [1.0, 2.0, 2.0, 0.0]
    expected = np.array(logits) - np.log(np.exp(logits).sum())
    got = draw(logits, temperature=0.0, logprobs=3, banned=(1,), repetition_penalty=5.0, history=[2], prompt_len=1)
    assert got.token_id == got.logprob.token_id == 0
    assert got.logprob.logprob == pytest.approx(expected[0])
    assert [i for i, _ in got.logprob.top] == [1, 2, 0]
    assert [p for _, p in got.logprob.top] == pytest.approx(expected[[1, 2, 0]])
    assert draw(logits, logprobs=0).logprob.top == ()
    assert draw(logits).logprob is None
    assert len(draw(logits, logprobs=20).logprob.top) == 4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draws_follow_the_tempered_distribution(dtype):
    logits = np.array([0.0, 1.0, -1.0, 2.0])
    expected = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    assert histogram(logits, temperature=0.7, dtype=dtype) == pytest.approx(expected, abs=0.035)


def test_top_k_keeps_k_and_breaks_ties_by_id():
    assert (histogram([1.0, 2.0, 1.0, 1.0], n=400, top_k=2) > 0).tolist() == [True, True, False, False]
    assert draw([1.0, 2.0], top_k=1, seed=3).token_id == 1
    assert (histogram([0.0, 0.0, 0.0], n=200, top_k=50) > 0).all()


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log([0.15, 0.5, 0.25, 0.1])
    for top_p, kept in [
        (0.0, [1]),
        (0.49, [1]),
        (0.51, [1, 2]),
        (0.74, [1, 2]),
        (0.76, [0, 1, 2]),
        (0.95, [0, 1, 2, 3]),
    ]:
        assert np.flatnonzero(histogram(logits, n=300, top_p=top_p)).tolist() == kept
    shares = histogram(logits, top_p=0.7)
    assert shares == pytest.approx([0, 2 / 3, 1 / 3, 0], abs=0.035)


def test_top_p_applies_to_what_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the two that remain, the first has 4/7 of the mass.
    assert np.flatnonzero(histogram(logits, n=300, top_k=2, top_p=0.55)).tolist() == [0]
    assert np.flatnonzero(histogram(logits, n=300, top_k=2, top_p=0.6)).tolist() == [0, 1]


def test_a_flat_vocabulary_needs_more_than_the_first_try():
    logits = np.zeros(5000)
    drawn = [draw(logits, top_p=0.9, seed=seed).token_id for seed in range(300)]
    assert max(drawn) < 4500, "equal weights: the lowest ids are kept"
    assert max(drawn) > 4000
    rising = np.linspace(0.0, 1e-6, 5000)
    assert min(draw(rising, top_p=0.999, seed=seed, dtype=np.float64).token_id for seed in range(300)) >= 4


def test_extremes_give_no_warning_and_a_possible_token():
    assert draw([0.0, 1.0, -np.inf], temperature=1e-300).token_id == 1
    assert draw([3e38, -3e38], temperature=1e-30).token_id == 0
    for seed in range(200):
        assert draw([-np.inf, 1.0, -np.inf, 1.0, -np.inf], seed=seed).token_id in (1, 3)


def test_a_draw_is_a_function_of_seed_choice_and_position():
    logits = np.zeros(1000)
    same = draw(logits, seed=5, choice=1, history=[1, 2, 3], prompt_len=2)
    assert draw(logits, seed=5, choice=1, history=[9, 2], prompt_len=1) == same
    others = [
        draw(logits, seed=6, choice=1, history=[1, 2, 3], prompt_len=2),
        draw(logits, seed=5, choice=0, history=[1, 2, 3], prompt_len=2),
        draw(logits, seed=5, choice=1, history=[1, 2, 3], prompt_len=1),
    ]
    assert all(other != same for other in others)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"presence_penalty": 1.0}])
def test_a_broken_model_is_loud(params):
    with pytest.raises(FloatingPointError, match="not finite"):
        draw([0.0, float("nan"), 1.0], **params)


def test_the_last_possible_number_is_still_a_token(monkeypatch):
    monkeypatch.setattr("pdserve.engine.sampling.uniform", lambda *_: 1.0 - 2.0**-53)
    for n in range(1, 200):
        assert draw([*np.linspace(-3, 3, n), -np.inf]).token_id == n - 1
