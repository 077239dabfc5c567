"""The weights on the device: checked against the configuration, then fused as the forward pass wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.engine.torch_engine.config import ModelConfig

    Shape = tuple[int, ...]

_SHOWN = 4


class TensorSource(Protocol):
    """A checkpoint under the tensor names of Hugging Face, whatever its format."""

    @property
    def origin(self) -> str:
        """What errors call it."""
        ...

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def load(self, name: str) -> torch.Tensor:
        """In the CPU's memory, in a floating point type, rotated halves of q and k in the order of Hugging Face."""
        ...


@attrs.frozen
class Linear:
    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None


@attrs.frozen
class Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    """Rows: all query heads, all key heads, all value heads."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@attrs.frozen
class Weights:
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor
    """[vocab, hidden]; the embedding itself when tied."""


def load_weights(config: ModelConfig, source: TensorSource, device: torch.device, dtype: torch.dtype) -> Weights:
    """Raises ConfigError that names tensors which are missing, of another shape, or not part of such a model."""
    _check(source, _expected(config))
    return _Loader(config, source, device, dtype).load()


def _expected(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    layer: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, (rows, columns, biased) in linears.items():
        layer[f"{name}.weight"] = (rows, columns)
        if biased:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    expected: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tied:
        expected["lm_head.weight"] = (config.vocab, hidden)
    for i in range(config.layers):
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return expected


def _check(source: TensorSource, expected: Mapping[str, Shape]) -> None:
    shapes = source.shapes
    _refuse(source, "lacks", (name for name in expected if name not in shapes))
    wrong = ((name, shapes[name], shape) for name, shape in expected.items() if shapes[name] != shape)
    _refuse(source, "has the wrong shape in", (f"{name}: {has}, not {shape}" for name, has, shape in wrong))
    # An unknown tensor, say a bias, would change the result: better no model than a wrong one.
    ignored = {"lm_head.weight"}
    strange = (n for n in shapes if n not in expected and n not in ignored and not n.endswith("rotary_emb.inv_freq"))
    _refuse(source, "has tensors that its architecture does not know:", strange)


def _refuse(source: TensorSource, what: str, names: Iterable[str]) -> None:
    listed = list(names)
    if listed:
        more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        raise ConfigError(f"--model: {source.origin} {what} {', '.join(listed[:_SHOWN])}{more}")


class _Loader:
    def __init__(self, config: ModelConfig, source: TensorSource, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._source = source
        self._device = device
        self._dtype = dtype

    def load(self) -> Weights:
        embedding = self._tensor("model.embed_tokens.weight")
        return Weights(
            embedding=embedding,
            layers=tuple(self._layer(f"model.layers.{i}") for i in range(self._config.layers)),
            norm=self._tensor("model.norm.weight"),
            head=embedding if self._config.tied else self._tensor("lm_head.weight"),
        )

    def _layer(self, at: str) -> Layer:
        config, attention, mlp = self._config, f"{at}.self_attn", f"{at}.mlp"
        return Layer(
            attention_norm=self._tensor(f"{at}.input_layernorm.weight"),
            qkv=self._linear([f"{attention}.{name}_proj" for name in "qkv"], config.qkv_bias),
            q_norm=self._tensor(f"{attention}.q_norm.weight") if config.qk_norm else None,
            k_norm=self._tensor(f"{attention}.k_norm.weight") if config.qk_norm else None,
            output=self._linear([f"{attention}.o_proj"], config.output_bias),
            mlp_norm=self._tensor(f"{at}.post_attention_layernorm.weight"),
            gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], config.mlp_bias),
            down=self._linear([f"{mlp}.down_proj"], config.mlp_bias),
        )

    def _linear(self, names: list[str], biased: bool) -> Linear:
        bias = self._fused([f"{name}.bias" for name in names]) if biased else None
        return Linear(self._fused([f"{name}.weight" for name in names]), bias)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._fused([name])

    def _fused(self, names: list[str]) -> torch.Tensor:
        """Copied part by part into its final place: never two copies of a whole model in memory."""
        shapes = [self._source.shapes[name] for name in names]
        rows = [shape[0] for shape in shapes]
        fused = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(fused, rows), strict=True):
            part.copy_(self._source.load(name))
        return fused
