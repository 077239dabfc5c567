"""The tokenizer of a Hugging Face model directory: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from pdserve.errors import ConfigError
from pdserve.text.bpe import BpeTokenizer, VocabularyFacts, digest

if TYPE_CHECKING:
    from pathlib import Path


def tokenizer_from_directory(path: Path) -> BpeTokenizer:
    spec = read_json(path / "tokenizer.json")
    config = read_json(path / "tokenizer_config.json", optional=True)
    try:
        backend = Backend.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"--model: {path / 'tokenizer.json'} is not usable: {error}") from error
    steps = _decoder_steps(spec.get("decoder"))
    byte_level = "ByteLevel" in steps
    if not byte_level and not steps.keys() & {"ByteFallback", "Metaspace", "Replace"}:
        raise ConfigError(f"--model: {path / 'tokenizer.json'}: the decoder {sorted(steps)} is not supported")

    eos_token, bos_token = _content(config.get("eos_token")), _content(config.get("bos_token"))
    eos = {backend.token_to_id(eos_token)} if eos_token else set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name, optional=True).get("eos_token_id")
        eos |= set(value) if isinstance(value, list) else {value}
    bos = backend.token_to_id(bos_token) if bos_token else None
    starts_with = backend.encode("").ids[:1]
    facts = VocabularyFacts(
        eos=frozenset(i for i in eos if isinstance(i, int)),
        eos_token=eos_token,
        bos=bos,
        add_bos=bool(config.get("add_bos_token", bos is not None and starts_with == [bos])),
        chat_template=_chat_template(path, config),
        vocab_hash=directory_vocab_hash(spec),
        byte_level=byte_level,
        strip_space="Strip" in steps or steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never",
    )
    return BpeTokenizer(backend, facts)


def directory_vocab_hash(spec: dict[str, Any]) -> str:
    """SHA-256 of vocabulary, merges and added tokens of a parsed tokenizer.json, however the file is formatted."""
    model = spec.get("model", {})
    vocab = model.get("vocab", {})
    pieces = sorted(vocab.items(), key=lambda item: item[1]) if isinstance(vocab, dict) else vocab
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    added = [(t.get("id"), t.get("content"), t.get("special")) for t in spec.get("added_tokens", [])]
    return digest((pieces, merges, added))


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} if it is optional and missing. Raises ConfigError naming the file."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--model: {path} is not a JSON object")
    return value


def _decoder_steps(decoder: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    if decoder is None:
        return {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return {step["type"]: step for step in steps}


def _content(token: object) -> str:
    """tokenizer_config.json writes a token as its text or as an object with the text inside."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default", next(iter(by_name.values()), None))
    return template if isinstance(template, str) else None
