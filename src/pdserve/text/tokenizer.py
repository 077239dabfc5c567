"""Text to exact token ids and back: the protocol, and where a model's tokenizer comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdserve.text.bytelevel import ByteTokenizer
from pdserve.text.gguf import read_gguf
from pdserve.text.gguf_vocab import tokenizer_from_gguf
from pdserve.text.hf_vocab import tokenizer_from_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.models import ModelFiles


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
        return tokenizer_from_gguf(files.path, read_gguf(files.path).metadata)
    return tokenizer_from_directory(files.path)
