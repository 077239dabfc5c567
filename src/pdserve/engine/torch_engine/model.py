"""The forward pass of the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) over a ragged batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pdserve.engine.torch_engine.attention import attend

if TYPE_CHECKING:
    from pdserve.engine.torch_engine.attention import Batch, KvPool
    from pdserve.engine.torch_engine.config import ModelConfig
    from pdserve.engine.torch_engine.weights import Layer, Linear, Weights

_FEW_ROWS = 16


class Model:
    def __init__(self, config: ModelConfig, weights: Weights, rope_factors: torch.Tensor | None = None) -> None:
        self._config = config
        self._weights = weights
        frequencies = config.frequencies()
        if rope_factors is not None:
            frequencies = frequencies / rope_factors
        self._frequencies = frequencies.to(weights.embedding.device)

    def forward(self, batch: Batch, pool: KvPool, rows: list[int]) -> torch.Tensor:
        """Write the batch's KV into the pool; float32 logits [len(rows), vocab] of the given rows of the batch."""
        weights, eps = self._weights, self._config.norm_eps
        hidden = F.embedding(batch.tokens, weights.embedding)
        angles = batch.positions.float()[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        for i, layer in enumerate(weights.layers):
            hidden = hidden + self._attention(i, layer, _norm(hidden, layer.attention_norm, eps), cos, sin, batch, pool)
            gate, up = _linear(_norm(hidden, layer.mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + _linear(F.silu(gate) * up, layer.down)
        return _matmul(_norm(hidden[rows], weights.norm, eps), weights.head).float()

    def _attention(
        self, i: int, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, pool: KvPool
    ) -> torch.Tensor:
        config = self._config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        qkv = _linear(x, layer.qkv).view(-1, heads + 2 * kv_heads, size)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :heads] = _norm(qkv[:, :heads], layer.q_norm, config.norm_eps)
            qkv[:, heads : heads + kv_heads] = _norm(qkv[:, heads : heads + kv_heads], layer.k_norm, config.norm_eps)
        _rotate_(qkv[:, : heads + kv_heads], cos, sin)
        pool.write(i, batch, qkv[:, heads:].view(-1, 2, kv_heads, size))
        out = attend(qkv[:, :heads], i, batch, pool)
        return _linear(out.flatten(1), layer.output)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rope in place on [T, heads, head_dim]: element j of a head's first half turns with element j of its second."""
    first, second = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    out = _matmul(x, linear.weight)
    return out if linear.bias is None else out + linear.bias


def _matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T. For a few rows on a CPU the transposed product: BLAS then runs up to twice as fast."""
    if x.device.type == "cpu" and 1 < x.shape[0] <= _FEW_ROWS:
        return (weight @ x.t()).t().contiguous()
    return F.linear(x, weight)
