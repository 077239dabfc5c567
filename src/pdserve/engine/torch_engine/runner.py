"""`load_engine`: from a checkpoint to an engine that runs steps over its own paged KV memory."""

from __future__ import annotations

import math
import mmap
import sys
from typing import TYPE_CHECKING

import torch

from pdserve.engine.base import KvMemory, StepResult
from pdserve.engine.memory import no_room
from pdserve.engine.torch_engine.attention import BatchBuilder, KvPool
from pdserve.engine.torch_engine.checkpoints import GgufSource, SafetensorsSource
from pdserve.engine.torch_engine.config import gguf_config, hf_config
from pdserve.engine.torch_engine.model import Model
from pdserve.engine.torch_engine.sampler import sample_rows
from pdserve.engine.torch_engine.weights import load_weights
from pdserve.errors import ConfigError
from pdserve.text.gguf import read_gguf
from pdserve.text.hf_vocab import read_json
from pdserve.wire.messages import KvLayout

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.engine.base import Sampled, StepPlan
    from pdserve.engine.torch_engine.config import ModelConfig
    from pdserve.wire.messages import ModelCard

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_engine(
    path: Path,
    *,
    name: str,
    card: ModelCard,
    device: str = "auto",
    dtype: str = "auto",
    threads: int = 0,
    page_size: int = 16,
    kv_tokens: int = 16384,
    max_seq_len: int,
    eos_token_ids: frozenset[int],
) -> TorchEngine:
    """Load a GGUF file or a Hugging Face directory and allocate `kv_tokens` positions of KV, in whole pages.

    Raises ConfigError, naming what it is about, for a model that is not supported or broken and for unusable values.
    `threads` = 0 leaves torch's own choice. Run it and the engine on one thread.
    """
    if threads > 0:
        torch.set_num_threads(threads)
    where = _device(device)
    kind = _dtype(dtype, where)
    try:
        config, model = _load_model(path, where, kind)
        if config.window is not None and max_seq_len > config.window:
            raise ConfigError(
                f"--model {name}: attention has a sliding window, which is not supported; "
                f"--max-seq-len {config.window} or less does not need it"
            )
        pool = KvPool(_allocate(config, kv_tokens, page_size, where, kind))
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"--model {name} does not fit {where}: {error}") from error
    return TorchEngine(model, pool, card, eos_token_ids)


class TorchEngine:
    """One model on one device; see `pdserve.engine.base.Engine` for the contract."""

    threaded = True

    def __init__(self, model: Model, pool: KvPool, card: ModelCard, eos_token_ids: frozenset[int]) -> None:
        pages = pool.pages
        page_bytes = pages[0].nbytes
        self.card = card
        self.eos_token_ids = eos_token_ids
        self.num_pages = pages.shape[0]
        self.memory = KvMemory(pages.data_ptr(), pages.nbytes, page_bytes, str(pages.device), pages)
        self.layout = KvLayout(
            page_size=pool.page_size,
            page_bytes=page_bytes,
            layers=pool.layers,
            kv_heads=pool.kv_heads,
            head_dim=pool.head_dim,
            dtype=str(pages.dtype).removeprefix("torch."),
        )
        self._loaded: tuple[Model, KvPool] | None = (model, pool)
        self._builder = BatchBuilder(pool, pages.dtype)

    def step(self, plan: StepPlan) -> StepResult:
        """Copies, then one forward pass over all work, then the samples. Raises RuntimeError when closed."""
        if self._loaded is None:
            raise RuntimeError("the engine is closed")
        model, pool = self._loaded
        with torch.inference_mode():
            for source, target in plan.copies:
                pool.copy(source, target)
            drawn: list[tuple[Sampled, ...]] = [()] * len(plan.work)
            if plan.work:
                batch = self._builder.build(plan.work)
                sampled = [i for i, item in enumerate(plan.work) if item.samples]
                logits = model.forward(batch, pool, [batch.last_rows[i] for i in sampled])
                rows = sample_rows(logits, [plan.work[i].samples for i in sampled])
                for i, tokens in zip(sampled, rows, strict=True):
                    drawn[i] = tokens
            if pool.pages.is_cuda:
                # Whoever is told of the step, a KV transfer first of all, may read its pages.
                torch.cuda.synchronize(pool.pages.device)
        return StepResult(tuple(drawn))

    def close(self) -> None:
        """Drop the weights and the engine's hold on the KV memory. Idempotent; `memory.owner` stays valid."""
        self._loaded = None


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device of torch") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"--device {name!r}: only cpu and cuda are supported")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(f"--device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name!r}: one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _load_model(path: Path, device: torch.device, dtype: torch.dtype) -> tuple[ModelConfig, Model]:
    if path.suffix == ".gguf":
        file = read_gguf(path)
        config = gguf_config(file)
        with GgufSource(file, config) as source:
            return config, Model(config, load_weights(config, source, device, dtype), source.rope_factors)
    config = hf_config(str(path / "config.json"), read_json(path / "config.json"))
    with SafetensorsSource(path) as source:
        return config, Model(config, load_weights(config, source, device, dtype))


def _allocate(
    config: ModelConfig, kv_tokens: int, page_size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Zeroed, because padding reads what was never written, and a NaN there would survive the mask."""
    if page_size < 1 or kv_tokens < page_size:
        raise ConfigError(f"--kv-tokens {kv_tokens} is less than one page of --page-size {page_size}")
    shape = (kv_tokens // page_size, config.layers, 2, page_size, config.kv_heads, config.head_dim)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > sys.maxsize:  # torch would count modulo 2^64
        raise no_room(kv_tokens, nbytes, "more than there are addresses")
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # Anonymous memory is zero without being touched: pages of the pool that nobody uses cost nothing.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, torch.OutOfMemoryError) as error:
        raise no_room(kv_tokens, nbytes, error) from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
