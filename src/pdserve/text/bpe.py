"""A vocabulary with merges.

The merges run in the `tokenizers` library; the way back is our own, byte by byte, because a stream needs the exact
bytes of one token and the library only gives text.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from threading import Lock
from typing import TYPE_CHECKING

import attrs

from pdserve.text.bytelevel import to_utf8

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenizers import Tokenizer as Backend

# Requests are encoded one at a time: the library's thread pool would only compete with the engine, and warn on fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free code point from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


BYTE_ALPHABET = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@attrs.frozen
class VocabularyFacts:
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

    def __init__(self, backend: Backend, facts: VocabularyFacts) -> None:
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
            return b"".join(bytes((BYTE_ALPHABET[c],)) if c in BYTE_ALPHABET else c.encode() for c in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes((int(byte[1], 16),)) if byte else token.replace("▁", " ").encode()


def digest(parts: Iterable[object]) -> str:
    """SHA-256 of JSON-able parts, in order."""
    result = hashlib.sha256()
    for part in parts:
        result.update(json.dumps(part).encode() + b"\n")
    return result.hexdigest()
