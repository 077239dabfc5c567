"""Models and settings that cannot be served are refused with a message that names the reason."""

import importlib
import json
import sys

import pytest
import torch

from pdserve.errors import ConfigError, MissingDependencyError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "config.json: architecture GemmaForCausalLM is not supported"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers is 'three'"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1"),
        ({"num_key_value_heads": 3}, "4 heads of 8, 3 KV heads do not fit"),
        ({"sliding_window": 256}, "sliding window.*--max-seq-len 256"),
        ({"num_hidden_layers": 4}, r"lacks model\.layers\.3\.input_layernorm\.weight.* and \d+ more"),
        ({"num_hidden_layers": 2}, r"does not know: model\.layers\.2"),
        ({"vocab_size": 60}, r"model\.embed_tokens\.weight: \(61, 32\), not \(60, 32\)"),
        ({"attention_bias": True}, r"lacks .*_proj\.bias"),
    ],
)
def test_configurations(changes, message, tools, tmp_path):
    config = tools.config("llama")
    path = tools.write(tmp_path / "model", config, tools.weights(config))
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=message):
        tools.driver(path)


def test_layer_types_decide_about_the_window(tools, tmp_path):
    config = tools.config("llama", sliding_window=8, layer_types=["full_attention"] * 3)
    tools.driver(tools.write(tmp_path / "model", config, tools.weights(config)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu9"}, "--device 'tpu9' is not a device"),
        ({"device": "meta"}, "only cpu and cuda"),
        ({"device": "cuda:99"}, "torch sees"),
        ({"dtype": "int3"}, "--dtype 'int3': one of auto, float32"),
        ({"kv_tokens": 3}, "--kv-tokens 3 is less than one page"),
        ({"kv_tokens": 1 << 50}, f"--kv-tokens {1 << 50} needs .* GiB of KV memory"),
        ({"kv_tokens": 1 << 62}, "GiB of KV memory"),
        ({"kv_tokens": 1 << 90}, "GiB of KV memory"),
    ],
)
def test_settings(options, message, tools, tiny_checkpoints):
    with pytest.raises(ConfigError, match=message):
        tools.driver(tiny_checkpoints("llama")[0], **options)


def test_broken_files(tools, tmp_path):
    config = tools.config("llama")
    weights = tools.weights(config)
    path = tools.write(tmp_path / "model", config, weights)
    (path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        tools.driver(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        tools.driver(path)
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no weight_map"):
        tools.driver(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "missing.safetensors"}}')
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.safetensors"):
        tools.driver(path)


def test_integer_weights(tools, tmp_path):
    config = tools.config("llama")
    weights = {**tools.weights(config), "model.norm.weight": torch.ones(32, dtype=torch.int8)}
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is of type I8"):
        tools.driver(tools.write(tmp_path / "model", config, weights))


def test_without_torch(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pdserve.engine.torch_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install torch==2\.13\.0"):
        importlib.import_module("pdserve.engine.torch_engine.runner")
