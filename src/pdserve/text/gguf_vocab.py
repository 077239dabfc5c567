"""The tokenizer inside a GGUF file's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pdserve.errors import ConfigError
from pdserve.text.bpe import BpeTokenizer, VocabularyFacts, digest

if TYPE_CHECKING:
    from pathlib import Path

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


def tokenizer_from_gguf(path: Path, meta: dict[str, Any]) -> BpeTokenizer:
    """Build the tokenizer. Raises ConfigError naming the file and what in it is missing, wrong or not supported."""
    try:
        return _build(path, meta)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"--model: {path} has no {error.args[0]}") from error
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"--model: the vocabulary in {path} is not usable: {error}") from error


def _build(path: Path, meta: dict[str, Any]) -> BpeTokenizer:
    kind = meta.get("tokenizer.ggml.model")
    pre = meta.get("tokenizer.ggml.pre", "default")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        backend = _byte_level_backend(tokens, meta["tokenizer.ggml.merges"], pre, path)
    elif kind == "llama":
        backend = _sentencepiece_backend(tokens, meta["tokenizer.ggml.scores"], types, meta)
    else:
        raise ConfigError(f"--model: {path}: the tokenizer type {kind!r} is not supported (gpt2 and llama are)")
    added = {t: k for t, k in zip(tokens, types, strict=True) if k in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
    backend.add_special_tokens([AddedToken(t, normalized=False) for t, k in added.items() if k != _USER_DEFINED])
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in added.items() if k == _USER_DEFINED])

    named = [meta.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    marked = (i for i, token in enumerate(tokens) if token in added and token in _END_OF_TURN)
    facts = VocabularyFacts(
        eos=frozenset(i for i in (*named, *marked) if isinstance(i, int)),
        eos_token=tokens[named[0]] if named[0] is not None else "",
        bos=meta.get("tokenizer.ggml.bos_token_id"),
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
    return digest(meta.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "tokens", "token_type", "merges"))
