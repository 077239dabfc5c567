"""Text to exact token ids and back, from a GGUF file's metadata or a Hugging Face directory.

The merges run in the `tokenizers` library; the way back is our own, byte by byte, because a stream needs the exact
bytes of one token and the library only gives text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pdserve.errors import ConfigError
from pdserve.text.bytelevel import ByteTokenizer, to_utf8
from pdserve.text.gguf import read_gguf

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pdserve.text.models import ModelFiles

# Requests are encoded one at a time: the library's own thread pool would only compete with the engine, and warn on fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer(Protocol):
    """What the HTTP layer and the workers know of a vocabulary. Safe to use from several threads."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an output: end of text, of turn, of message."""
        ...

    @property
    def eos_token(self) -> str: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def bos_token(self) -> str:
        """Text of the BOS token for chat templates; empty if there is none."""
        ...

    @property
    def add_bos(self) -> bool:
        """Whether a raw prompt starts with BOS. `encode` never adds it: a rendered chat template has its own."""
        ...

    @property
    def vocab_size(self) -> int:
        """Every id is below this. The model's logits may be wider (padding)."""
        ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def vocab_hash(self) -> str: ...

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special`: control tokens spelled out in the text become their ids; else they are text like any other."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; empty for special tokens and for ids outside the vocabulary."""
        ...

    def is_special(self, token_id: int) -> bool: ...


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The model's tokenizer. Raises ConfigError naming the file and the part of it that is not supported."""
    if files.path is None:
        return ByteTokenizer()
    if files.kind == "gguf":
        return _from_gguf(files.path, read_gguf(files.path).metadata)
    return _from_directory(files.path)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free code point from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTES = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@attrs.frozen
class _Facts:
    """What a model's files say about its vocabulary, beyond the merges."""

    eos: frozenset[int]
    eos_token: str
    bos: int | None
    add_bos: bool
    chat_template: str | None
    vocab_hash: str
    byte_level: bool
    """Tokens are spelled in GPT-2's byte alphabet; else in SentencePiece's (`▁` and `<0x0A>`)."""
    strip_space: bool = False
    """Encoding puts a space before the text, so decoding takes one away."""


class BpeTokenizer:
    """`Tokenizer` over the `tokenizers` library."""

    def __init__(self, backend: Backend, facts: _Facts) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._facts = facts
        self._added = {i: (t.content, t.special) for i, t in backend.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self._lock = Lock()  # whether control tokens are parsed is a state of the backend, not an argument
        self.vocab_size = max(backend.get_vocab_size(), *self._added, 0)
        self.eos_token_ids = facts.eos
        self.eos_token = facts.eos_token
        self.bos_token_id = facts.bos
        self.bos_token = "" if facts.bos is None else backend.id_to_token(facts.bos) or ""
        self.add_bos = facts.add_bos and facts.bos is not None
        self.chat_template = facts.chat_template
        self.vocab_hash = facts.vocab_hash

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        text = to_utf8(text).decode()
        with self._lock:
            self._backend.encode_special_tokens = not special
            return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        raw = bytearray()
        for token_id in ids:
            if not skip_special and self.is_special(token_id):
                raw += self._added[token_id][0].encode()
            else:
                raw += self.token_bytes(token_id)
        text = raw.decode("utf-8", errors="replace")
        return text[1:] if self._facts.strip_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def is_special(self, token_id: int) -> bool:
        return self._added.get(token_id, ("", False))[1]

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            content, special = self._added[token_id]
            return b"" if special else content.encode()
        token = self._backend.id_to_token(token_id) or ""
        if self._facts.byte_level:
            return b"".join(bytes((_BYTES[c],)) if c in _BYTES else c.encode() for c in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes((int(byte[1], 16),)) if byte else token.replace("▁", " ").encode()


# --- GGUF

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_END_OF_TURN = {
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>"),
}


def _pre_tokenizer(name: str, path: Path) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging, by GGUF's `tokenizer.ggml.pre`; the models' own tokenizer.json say the same."""

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        by_pattern = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match name:
        case "gpt-2" | "default":
            return gpt2
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        case "llama-bpe" | "llama3" | "llama-v3":
            return split(_LLAMA3)
        case "qwen2" | "deepseek-r1-qwen":
            return split(_QWEN2)
    raise ConfigError(
        f"--model: {path}: the pre-tokenizer {name!r} is not supported (smollm, gpt-2, llama-bpe, qwen2, default are); "
        "serve this model from its Hugging Face directory"
    )


def _from_gguf(path: Path, meta: dict[str, Any]) -> BpeTokenizer:
    kind = meta.get("tokenizer.ggml.model")
    pre = meta.get("tokenizer.ggml.pre", "default")
    try:
        tokens: list[str] = meta["tokenizer.ggml.tokens"]
        types: list[int] = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
        if kind == "gpt2":
            backend = _byte_level_backend(tokens, meta["tokenizer.ggml.merges"], pre, path)
        elif kind == "llama":
            backend = _sentencepiece_backend(tokens, meta["tokenizer.ggml.scores"], types, meta)
        else:
            raise ConfigError(f"--model: {path}: the tokenizer type {kind!r} is not supported (gpt2 and llama are)")
    except KeyError as error:
        raise ConfigError(f"--model: {path} has no {error.args[0]}") from error
    added = {t: k for t, k in zip(tokens, types, strict=True) if k in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
    backend.add_special_tokens([AddedToken(t, normalized=False) for t, k in added.items() if k != _USER_DEFINED])
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in added.items() if k == _USER_DEFINED])

    named = [meta.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    eos = {i for i in named if isinstance(i, int)} | {
        i for i, t in enumerate(tokens) if t in added and t in _END_OF_TURN
    }
    bos = meta.get("tokenizer.ggml.bos_token_id")
    facts = _Facts(
        eos=frozenset(eos),
        eos_token=tokens[named[0]] if named[0] is not None else "",
        bos=bos,
        add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre.startswith("llama"))),
        chat_template=meta.get("tokenizer.chat_template"),
        vocab_hash=gguf_vocab_hash(meta),
        byte_level=kind == "gpt2",
        strip_space=kind == "llama" and bool(meta.get("tokenizer.ggml.add_space_prefix", True)),
    )
    return BpeTokenizer(backend, facts)


def _byte_level_backend(tokens: list[str], merges: list[str], pre: str, path: Path) -> Backend:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, pairs, ignore_merges=pre.startswith("llama")))
    backend.pre_tokenizer = _pre_tokenizer(pre, path)
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(tokens: list[str], scores: list[float], types: list[int], meta: dict[str, Any]) -> Backend:
    """SentencePiece's BPE has scores instead of merges: every split of a piece into two pieces merges at its score."""
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = sorted((i for i, kind in enumerate(types) if kind == _NORMAL), key=lambda i: -scores[i])
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in ranked)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Backend(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("▁")] if meta.get("tokenizer.ggml.add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    return backend


def gguf_vocab_hash(meta: dict[str, Any]) -> str:
    """SHA-256 of all that decides which ids a text becomes."""
    return _digest(meta.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "tokens", "token_type", "merges"))


def _digest(parts: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest()


# --- Hugging Face directory


def _from_directory(path: Path) -> BpeTokenizer:
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
    facts = _Facts(
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
    return _digest((pieces, merges, added))


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
