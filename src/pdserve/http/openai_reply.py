"""OpenAI's responses: completions and chat, as a document and as chunks, with both shapes of logprobs."""

from __future__ import annotations

import codecs
import secrets
import time
from typing import TYPE_CHECKING, Any

import attrs

from pdserve.http.exchange import to_json
from pdserve.http.reply import sse
from pdserve.wire.messages import Delta

if TYPE_CHECKING:
    from pdserve.http.reply import Usage
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.wire.messages import TokenLogprob

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry; OpenAI's own value."""


@attrs.frozen
class StreamOptions:
    include_usage: bool = False
    token_ids: bool = False
    """Extension `return_token_ids`: choices carry `token_ids` and `start_index`."""


class _OpenAIReply:
    """What completions and chat have in common. See `Reply`."""

    object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, model: str, tokenizer: Tokenizer, options: StreamOptions) -> None:
        self._options = options
        self._tokens = _TokenTexts(tokenizer)
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": "",
            "created": int(time.time()),
            "model": model,
        }
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._last = delta

    def tail(self, usage: Usage) -> bytes:
        end = sse(b"[DONE]")
        if not self._options.include_usage:
            return end
        last = {**self._head, "object": self.chunk_object, "choices": [], "usage": _usage(usage)}
        return sse(to_json(last)) + end

    def _document(self, content: dict[str, Any], logprobs: dict[str, Any] | None, usage: Usage) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": logprobs, **_finish(self._last)}
        if self._options.token_ids:
            choice |= {"token_ids": self._token_ids, "start_index": 0}
        return {**self._head, "object": self.object, "choices": [choice], "usage": _usage(usage)}

    def _chunk(self, delta: Delta, content: dict[str, Any], logprobs: dict[str, Any] | None) -> bytes:
        choice = {"index": delta.choice, **content, "logprobs": logprobs, **_finish(delta)}
        if self._options.token_ids:
            choice |= {"token_ids": delta.token_ids, "start_index": delta.start_index}
        chunk: dict[str, Any] = {**self._head, "object": self.chunk_object, "choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = None
        return sse(to_json(chunk))

    def _is_silent(self, delta: Delta) -> bool:
        """Nothing to tell: its text is held back."""
        return not (delta.text or delta.logprobs or delta.finish or (self._options.token_ids and delta.token_ids))


class CompletionReply(_OpenAIReply):
    object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def event(self, delta: Delta, usage: Usage) -> bytes:
        if self._is_silent(delta):
            return b""
        return self._chunk(delta, {"text": delta.text}, self._tokens.completion_logprobs(delta.logprobs))

    def document(self, usage: Usage) -> dict[str, Any]:
        logprobs = self._tokens.completion_logprobs(self._logprobs)
        return self._document({"text": "".join(self._text)}, logprobs, usage)


class ChatReply(_OpenAIReply):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    _begun = False

    def event(self, delta: Delta, usage: Usage) -> bytes:
        first = b""
        if not self._begun:
            self._begun = True
            blank = Delta(id=delta.id, epoch=delta.epoch, start_index=delta.start_index, choice=delta.choice)
            first = self._chunk(blank, {"delta": {"role": "assistant", "content": ""}}, None)
        if self._is_silent(delta):
            return first
        content = {"delta": {"content": delta.text} if delta.text else {}}
        return first + self._chunk(delta, content, self._tokens.chat_logprobs(delta.logprobs))

    def document(self, usage: Usage) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(self._text), "refusal": None}
        return self._document({"message": message}, self._tokens.chat_logprobs(self._logprobs), usage)


class _TokenTexts:
    """Single tokens as text and bytes, and how far into the output's text they begin."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def completion_logprobs(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
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

    def chat_logprobs(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
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


def _finish(delta: Delta | None) -> dict[str, Any]:
    if delta is None or delta.finish is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
