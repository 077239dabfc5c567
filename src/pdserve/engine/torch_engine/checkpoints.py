"""The two checkpoint formats behind one interface: GGUF files and Hugging Face directories of safetensors."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from pdserve.errors import ConfigError
from pdserve.text.hf_vocab import read_json

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from pdserve.engine.torch_engine.config import ModelConfig
    from pdserve.text.gguf import GgufFile, GgufTensor

_FLOATS = {"F64", "F32", "F16", "BF16"}
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rope frequencies, [head_dim / 2]: how GGUF writes the llama3 scaling."""


class GgufSource:
    """Dequantises one tensor at a time from the mapped file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.origin = str(file.path)
        self._config = config
        self._interleaved = file.metadata["general.architecture"] == "llama"
        self._tensors = {_hf_name(name): tensor for name, tensor in file.tensors.items() if name != ROPE_FACTORS}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._data = np.memmap(file.path, mode="r", dtype=np.uint8)
        factors = file.tensors.get(ROPE_FACTORS)
        self.rope_factors = None if factors is None else self._read(factors)

    def load(self, name: str) -> torch.Tensor:
        """Raises ConfigError for a quantisation that cannot be read, and for a truncated file."""
        tensor = self._read(self._tensors[name])
        if self._interleaved and (match := re.search(r"self_attn\.([qk])_proj\.", name)):
            heads = self._config.heads if match[1] == "q" else self._config.kv_heads
            return _deinterleave(tensor, heads)
        return tensor

    def _read(self, tensor: GgufTensor) -> torch.Tensor:
        try:
            kind = gguf.GGMLQuantizationType(tensor.ggml_type)
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
            end = tensor.offset + int(np.prod(shape))
            if end > len(self._data):
                raise ConfigError(f"--model: {self.origin} is truncated: {tensor.name} ends at byte {end}")
            values = dequantize(self._data[tensor.offset : end].reshape(shape), kind)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"--model: {self.origin}: cannot read {tensor.name}: {error}") from error
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]).reshape(tensor.shape))

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._data


def _hf_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _GGUF_NAMES:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_GGUF_NAMES[match[2]]}.{match[3]}"


def _deinterleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo ggml's order for rope: it rotates neighbouring rows of a head, Hugging Face a row of each half."""
    rows, *rest = tensor.shape
    return tensor.view(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(tensor.shape)


class SafetensorsSource:
    """All shards of a directory, mapped; the index names them, without one it is every *.safetensors file."""

    rope_factors: torch.Tensor | None = None

    def __init__(self, directory: Path) -> None:
        self.origin = str(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shards: dict[str, Any] = {}
        with ExitStack() as stack:
            for path in _shards(directory):
                self._open(stack, path)
            self._stack = stack.pop_all()

    def _open(self, stack: ExitStack, path: Path) -> None:
        try:
            shard = stack.enter_context(safe_open(path, framework="pt"))
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                part = shard.get_slice(name)
                if part.get_dtype() not in _FLOATS:
                    raise ConfigError(f"--model: {path}: {name} is of type {part.get_dtype()}, which is not supported")
                self.shapes[name] = tuple(part.get_shape())
                self._shards[name] = shard
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"--model: cannot read {path}: {error}") from error

    def load(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._shards[name].get_tensor(name)
        return tensor

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shards.clear()
        self._stack.close()


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ConfigError(f"--model: {index} has no weight_map")
        return [directory / name for name in sorted(set(names.values()))]
    single = directory / "model.safetensors"
    shards = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"--model: {directory} has no *.safetensors")
    return shards
