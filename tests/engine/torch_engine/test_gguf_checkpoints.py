"""GGUF files, written here as llama.cpp's converter writes them."""

import gguf
import numpy as np
import pytest
import torch

from pdserve.errors import ConfigError

IDS = [(13 * i + i * i) % 61 for i in range(40)]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(array, heads):
    """The row order of q and k in GGUF files of the llama architecture."""
    shape = array.shape
    return array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(path, config, weights, *, arch=None, quantised=None, factors=None, fields=None):
    arch = arch or {"Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}[config["architectures"][0][:-11]]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_rope_freq_base(config["rope_theta"] or rope["rope_theta"])
    if rope.get("type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for key, value in (fields or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, tensor in weights.items():
        array = tensor.numpy()
        stem, _, kind = name.rpartition(".")
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"]
            array = interleaved(array, heads)
        if stem.startswith("model.layers."):
            layer, _, part = stem.removeprefix("model.layers.").partition(".")
            target = f"blk.{layer}.{NAMES[part]}.{kind}"
        else:
            target = f"{NAMES[stem]}.{kind}"
        if quantised is not None and array.ndim == 2 and array.shape[1] % 32 == 0:
            writer.add_tensor(target, gguf.quants.quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(target, array)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "llama biased", "llama linear", "qwen2", "qwen3"])
def test_equals_the_dense_model(family, tools, tmp_path):
    config = tools.config(family)
    weights = tools.weights(config, seed=3)
    driver = tools.driver(write_gguf(tmp_path / "m.gguf", config, weights))
    expected = tools.expected(config, weights, IDS)
    pages = list(range(10))
    tools.assert_close(driver.prefill(IDS[:39], pages, chunk=20), expected[38])
    (actual,) = driver.step(driver.work(IDS, 39, 40, pages))
    tools.assert_close(actual, expected[39])


def test_a_bias_of_one_layer_only_is_refused(tools, tmp_path):
    """A model must not be run without a part of it."""
    config = tools.config("llama")
    weights = {**tools.weights(config), "model.layers.1.self_attn.q_proj.bias": torch.ones(32)}
    with pytest.raises(ConfigError, match=r"does not know: model\.layers\.1\.self_attn\.q_proj\.bias"):
        tools.driver(write_gguf(tmp_path / "m.gguf", config, weights))


def test_rope_factors_of_llama_3(tools, tmp_path):
    """The converter writes the scaling of llama 3.1 as one divisor for each frequency."""
    config = tools.config("llama 3.1")
    weights = tools.weights(config)
    plain = tools.config("llama")
    half = 4
    factors = []
    for j in range(half):
        frequency = 500.0 ** (-j / half)
        turns = 64 * frequency / (2 * np.pi)
        share = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        factors.append(1 / (share + (1 - share) / 8.0))
    driver = tools.driver(write_gguf(tmp_path / "m.gguf", plain, weights, factors=factors))
    tools.assert_close(driver.prefill(IDS, list(range(10))), tools.expected(config, weights, IDS)[-1])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantised(kind, tools, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    config = tools.config("qwen2")
    weights = tools.weights(config)
    driver = tools.driver(write_gguf(tmp_path / "m.gguf", config, weights, quantised=kind))

    def rounded(tensor):
        if tensor.ndim != 2 or tensor.shape[1] % 32:
            return tensor
        array = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
        return tensor.new_tensor(array).view(tensor.shape)

    expected = tools.expected(config, {name: rounded(tensor) for name, tensor in weights.items()}, IDS)
    tools.assert_close(driver.prefill(IDS, list(range(10))), expected[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gemma2"}, "gemma2.*only llama, qwen2 and qwen3"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"fields": {"llama.expert_count": 8}}, "mixtures of experts"),
        ({"fields": {"llama.rope.dimension_count": 4}}, "llama.rope.dimension_count.*head size, 8"),
        ({"fields": {"llama.attention.sliding_window": 100}}, "sliding window.*--max-seq-len 100"),
    ],
)
def test_unsupported(options, message, tools, tmp_path):
    config = tools.config("llama")
    path = write_gguf(tmp_path / "m.gguf", config, tools.weights(config), **options)
    with pytest.raises(ConfigError, match=message):
        tools.driver(path)


def test_truncated(tools, tmp_path):
    config = tools.config("llama")
    path = write_gguf(tmp_path / "m.gguf", config, tools.weights(config))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ConfigError, match="truncated"):
        tools.driver(path)


def test_without_an_embedding(tools, tmp_path):
    config = tools.config("llama")
    weights = tools.weights(config)
    del weights["model.embed_tokens.weight"]
    with pytest.raises(ConfigError, match=r"no tensor token_embd\.weight"):
        tools.driver(write_gguf(tmp_path / "m.gguf", config, weights))


def test_a_quantisation_that_cannot_be_read(tools, tmp_path):
    config = tools.config("llama")
    path = write_gguf(tmp_path / "m.gguf", config, tools.weights(config))
    data = path.read_bytes()
    # In the directory, the type of a one-dimensional tensor follows its name, dimension count and dimension.
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(data[:at] + (250).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ConfigError, match=r"cannot read output_norm\.weight"):
        tools.driver(path)
