"""OpenAI's two shapes of logprobs: that of completions and that of chat."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.tokenizer import Tokenizer
    from pdserve.wire.messages import TokenLogprob

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry; OpenAI's own value."""


class TokenTexts:
    """Single tokens of one choice as text and bytes, and how far into that choice's text they begin."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def completion_logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        return {
            "tokens": [self._escaped(one.token_id) for one in logprobs],
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [
                {self._escaped(token_id): _finite(logprob) for token_id, logprob in _with_chosen(one)}
                for one in logprobs
            ],
            "text_offset": [self._advance(one.token_id) for one in logprobs],
        }

    def chat_logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        content = [
            {**self._entry(one.token_id, one.logprob), "top_logprobs": [self._entry(*other) for other in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._raw(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    def _escaped(self, token_id: int) -> str:
        """Tokens that are part of a character get OpenAI's `bytes:\\xe2\\x82` form, so that keys stay distinct."""
        raw = self._raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _raw(self, token_id: int) -> bytes:
        """A special token has no bytes in the output; here it is named."""
        return self._tokenizer.token_bytes(token_id) or self._tokenizer.decode([token_id], skip_special=False).encode()

    def _advance(self, token_id: int) -> int:
        start = self._offset
        self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return start


def _with_chosen(one: TokenLogprob) -> tuple[tuple[int, float], ...]:
    """OpenAI's completions always list the chosen token, among or after the k best."""
    if any(token_id == one.token_id for token_id, _ in one.top):
        return one.top
    return (*one.top, (one.token_id, one.logprob))


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
