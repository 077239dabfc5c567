"""Every family of models against a dense implementation, from safetensors directories."""

import pytest
import torch

IDS = [(17 * i + i * i) % 61 for i in range(90)]
FAMILIES = ["llama", "llama biased", "llama 3.1", "llama linear", "mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_chunks_and_decode_equal_the_dense_model(family, tiny_checkpoints, tools):
    path, config, weights = tiny_checkpoints(family)
    expected = tools.expected(config, weights, IDS)
    driver = tools.driver(path)
    pages = list(range(30))
    tools.assert_close(driver.prefill(IDS[:80], pages, chunk=33), expected[79])
    for n in range(80, 90):
        (actual,) = driver.step(driver.work(IDS[: n + 1], n, n + 1, pages))
        tools.assert_close(actual, expected[n])


def test_rope_settings_make_a_difference(tools, tiny_checkpoints):
    """Otherwise the tests above would also pass without them."""
    finals = []
    for family in ("llama", "llama 3.1", "llama linear"):
        _, config, weights = tiny_checkpoints(family)
        finals.append(tools.expected(config, weights, IDS)[-1])
    assert (finals[0] - finals[1]).abs().max() > 0.01
    assert (finals[0] - finals[2]).abs().max() > 0.01


def test_shards_are_found_through_the_index(tools, tmp_path):
    config = tools.config("llama")
    weights = tools.weights(config, seed=5)
    path = tools.write(tmp_path / "model", config, weights, shards=3)
    (path / "consolidated.safetensors").write_bytes(b"not part of the model")
    actual = tools.driver(path).prefill(IDS[:9], [0, 1, 2])
    tools.assert_close(actual, tools.expected(config, weights, IDS[:9])[-1])


def test_shards_are_found_without_an_index(tools, tmp_path):
    config = tools.config("qwen2")
    weights = tools.weights(config)
    path = tools.write(tmp_path / "model", config, weights, shards=2)
    (path / "model.safetensors.index.json").unlink()
    actual = tools.driver(path).prefill(IDS[:9], [0, 1, 2])
    tools.assert_close(actual, tools.expected(config, weights, IDS[:9])[-1])


def test_harmless_extra_tensors_are_ignored(tools, tmp_path):
    config = tools.config("llama", tie_word_embeddings=True)
    weights = tools.weights(config)
    stored = {
        **weights,
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    actual = tools.driver(tools.write(tmp_path / "model", config, stored)).prefill(IDS[:5], [0, 1])
    tools.assert_close(actual, tools.expected(config, weights, IDS[:5])[-1])


def test_a_window_that_is_never_full_makes_no_difference(tools, tmp_path):
    config = tools.config("mistral", sliding_window=512)
    weights = tools.weights(config)
    path = tools.write(tmp_path / "model", config, weights)
    actual = tools.driver(path, max_seq_len=512).prefill(IDS[:20], list(range(5)))
    tools.assert_close(actual, tools.expected(config, weights, IDS[:20])[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near(dtype, tiny_checkpoints, tools):
    path, config, weights = tiny_checkpoints("qwen3")
    driver = tools.driver(path, dtype=dtype)
    assert driver.engine.layout.dtype == dtype
    expected = tools.expected(config, weights, IDS[:30])
    actual = driver.prefill(IDS[:29], list(range(8)), chunk=11)
    assert (actual - expected[28]).abs().max() < 0.5
    (actual,) = driver.step(driver.work(IDS[:30], 29, 30, list(range(8))))
    assert (actual - expected[29]).abs().max() < 0.5
