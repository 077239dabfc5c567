"""What shape of model it is: from GGUF metadata, or from the config.json of a Hugging Face directory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import torch

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.gguf import GgufFile

_GGUF_ARCHITECTURES = {"llama", "qwen2", "qwen3"}
_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@attrs.frozen
class Llama3Rope:
    """Rope scaling of Llama 3.1: long wavelengths are stretched, short ones stay, between them it is blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        wavelengths = 2 * math.pi / frequencies
        stretched = frequencies / self.factor
        span = self.high_freq_factor - self.low_freq_factor
        blend = (self.original_length / wavelengths - self.low_freq_factor) / span
        blended = (1 - blend) * stretched + blend * frequencies
        scaled = torch.where(wavelengths > self.original_length / self.low_freq_factor, stretched, blended)
        return torch.where(wavelengths < self.original_length / self.high_freq_factor, frequencies, scaled)


@attrs.frozen
class LinearRope:
    """Every position is divided by `factor`."""

    factor: float

    def scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        return frequencies / self.factor


@attrs.frozen(kw_only=True)
class ModelConfig:
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | LinearRope | None = None
    tied: bool
    """The output matrix is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    """Sliding attention window in tokens. Not implemented: up to this length it makes no difference."""

    def __attrs_post_init__(self) -> None:
        for field in ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ConfigError(f"--model: {field} is {getattr(self, field)}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(f"--model: {self.heads} heads of {self.head_dim}, {self.kv_heads} KV heads do not fit")

    def frequencies(self) -> torch.Tensor:
        """Radians per position of each rotated pair, float32 [head_dim / 2]."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        frequencies = 1.0 / (self.rope_theta**exponents)
        return self.rope_scaling.scale(frequencies) if self.rope_scaling else frequencies


class _Fields:
    """Typed look-ups that name the file and the key."""

    def __init__(self, origin: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self._origin = origin
        self._values = values
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._unusable(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._unusable(key, value)
        return float(value)

    def _get(self, key: str, default: float | None) -> object:
        value = self._values.get(self._prefix + key)
        return default if value is None else value

    def _unusable(self, key: str, value: object) -> ConfigError:
        problem = "is missing" if value is None else f"is {value!r}"
        return ConfigError(f"--model: {self._origin}: {self._prefix}{key} {problem}")


def gguf_config(file: GgufFile) -> ModelConfig:
    """Raises ConfigError for an architecture or a variant of it that is not implemented."""
    arch = file.metadata.get("general.architecture")
    if arch not in _GGUF_ARCHITECTURES:
        raise ConfigError(f"--model: {file.path}: architecture {arch!r} is not supported, only llama, qwen2 and qwen3")
    fields = _Fields(str(file.path), file.metadata, f"{arch}.")
    if fields.integer("expert_count", 0):
        raise ConfigError(f"--model: {file.path}: mixtures of experts are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"--model: {file.path} has no tensor token_embd.weight")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.integer(key, head_dim) != head_dim:
            raise ConfigError(f"--model: {file.path}: {arch}.{key} is not the head size, {head_dim}: not supported")
    return ModelConfig(
        vocab=embedding.shape[0],
        hidden=hidden,
        intermediate=fields.integer("feed_forward_length"),
        layers=fields.integer("block_count"),
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(str(file.path), fields, file.metadata.get(f"{arch}.rope.scaling.type")),
        tied="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=arch == "qwen3",
        window=fields.integer("attention.sliding_window", 0) or None,
    )


def _gguf_scaling(origin: str, fields: _Fields, kind: object) -> LinearRope | None:
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return LinearRope(fields.number("rope.scaling.factor"))
    raise ConfigError(f"--model: {origin}: rope scaling {kind!r} is not supported, only linear and llama3")


def hf_config(origin: str, config: Mapping[str, Any]) -> ModelConfig:
    """From the contents of config.json; `origin` names the file in errors. Raises ConfigError as `gguf_config`."""
    names = config.get("architectures") or ()
    arch = next((_HF_ARCHITECTURES[name] for name in names if name in _HF_ARCHITECTURES), None)
    if arch is None:
        known = ", ".join(_HF_ARCHITECTURES)
        raise ConfigError(
            f"--model: {origin}: architecture {', '.join(names) or 'none'} is not supported, only {known}"
        )
    if config.get("quantization_config"):
        raise ConfigError(f"--model: {origin}: quantised safetensors are not supported (GGUF files are)")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"--model: {origin}: activation {config['hidden_act']!r} is not supported, only silu")
    fields = _Fields(origin, config)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    rope = _hf_rope(config)
    attention_bias = arch != "qwen2" and bool(config.get("attention_bias"))
    return ModelConfig(
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_Fields(origin, rope).number("rope_theta", 10000.0),
        rope_scaling=_hf_scaling(origin, rope),
        tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=arch == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=arch == "llama" and bool(config.get("mlp_bias")),
        qk_norm=arch == "qwen3",
        window=_hf_window(fields, config),
    )


def _hf_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 all in `rope_parameters`."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta"), "rope_type": nested.get("type")}
    return rope | {key: value for key, value in nested.items() if value is not None}


def _hf_scaling(origin: str, rope: Mapping[str, Any]) -> Llama3Rope | LinearRope | None:
    fields = _Fields(origin, rope)
    kind = rope.get("rope_type")
    if kind in (None, "default"):
        return None
    if kind == "linear":
        return LinearRope(fields.number("factor"))
    if kind == "llama3":
        return Llama3Rope(
            fields.number("factor"),
            fields.number("low_freq_factor"),
            fields.number("high_freq_factor"),
            fields.integer("original_max_position_embeddings"),
        )
    raise ConfigError(f"--model: {origin}: rope scaling {kind!r} is not supported, only linear and llama3")


def _hf_window(fields: _Fields, config: Mapping[str, Any]) -> int | None:
    layer_types = config.get("layer_types")
    if config.get("use_sliding_window", True) is False or (layer_types and "sliding_attention" not in layer_types):
        return None
    return fields.integer("sliding_window", 0) or None
