"""The built-in `sim-bytes` tokenizer: one token a byte and three control tokens. Needs no files and no libraries."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SPECIAL = {256: "<|eos|>", 257: "<|im_start|>", 258: "<|im_end|>"}
_SPECIAL_IDS = {text: token_id for token_id, text in _SPECIAL.items()}
_SPECIAL_PATTERN = re.compile("(" + "|".join(map(re.escape, _SPECIAL_IDS)) + ")")

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8; 256 ends the output, 257 and 258 frame a chat turn. See `Tokenizer`."""

    eos_token_ids = frozenset({256, 258})
    eos_token = "<|eos|>"
    bos_token_id: int | None = None
    bos_token = ""
    add_bos = False
    vocab_size = 259
    chat_template: str | None = CHATML_TEMPLATE
    vocab_hash = hashlib.sha256(b"pdserve sim-bytes 1").hexdigest()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        if not special:
            return list(to_utf8(text))
        ids: list[int] = []
        for part in _SPECIAL_PATTERN.split(text):
            if part in _SPECIAL_IDS:
                ids.append(_SPECIAL_IDS[part])
            else:
                ids.extend(to_utf8(part))
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        raw = bytearray()
        for token_id in ids:
            raw += self.token_bytes(token_id)
            if not skip_special and token_id in _SPECIAL:
                raw += _SPECIAL[token_id].encode()
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if 0 <= token_id < 256 else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in _SPECIAL


def to_utf8(text: str) -> bytes:
    """UTF-8 of any Python string; a lone surrogate (JSON can carry one) becomes U+FFFD instead of an error."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
