"""OpenAI's responses: completions and chat, as a document and as chunks."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import attrs

from pdserve.http.choices import Choices, Output, Outputs
from pdserve.http.exchange import to_json
from pdserve.http.openai_logprobs import TokenTexts
from pdserve.http.reply import sse
from pdserve.wire.messages import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.http.reply import Usage
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.wire.messages import TokenLogprob


@attrs.frozen
class ReplyOptions:
    choices: Choices
    logprobs: bool
    """A document shows them; else they are there at most to rank the choices. Streams show what they are given."""
    include_usage: bool = False
    token_ids: bool = False
    """Extension `return_token_ids`: choices carry `token_ids` and `start_index`."""


class _OpenAIReply:
    """What completions and chat have in common. See `Reply`.

    With `best_of` above n the usage counts every generated choice, not only the n that are shown.
    """

    object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, model: str, tokenizer: Tokenizer, options: ReplyOptions) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._outputs = Outputs(options.choices)
        self._texts: defaultdict[int, TokenTexts] = defaultdict(lambda: TokenTexts(tokenizer))
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": "",
            "created": int(time.time()),
            "model": model,
        }

    def add(self, delta: Delta) -> None:
        self._outputs.add(delta)

    def document(self, usage: Usage) -> dict[str, Any]:
        choices = [self._choice(index, output) for index, output in enumerate(self._outputs.chosen())]
        return {**self._head, "object": self.object, "choices": choices, "usage": _usage(usage)}

    def tail(self, usage: Usage) -> bytes:
        end = sse(b"[DONE]")
        if not self._options.include_usage:
            return end
        last = {**self._head, "object": self.chunk_object, "choices": [], "usage": _usage(usage)}
        return sse(to_json(last)) + end

    def _shown(self, output: Output, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The content and the logprobs of a document's choice."""
        raise NotImplementedError

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        logprobs = output.logprobs if self._options.logprobs else []
        choice = {"index": index, **self._shown(output, logprobs), **_finish(output.deltas[-1])}
        if self._options.token_ids:
            choice |= {"token_ids": output.token_ids, "start_index": 0}
        return choice

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
        logprobs = self._texts[delta.choice].completion_logprobs(delta.logprobs)
        return self._chunk(delta, {"text": delta.text}, logprobs)

    def _shown(self, output: Output, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"text": output.text, "logprobs": TokenTexts(self._tokenizer).completion_logprobs(logprobs)}


class ChatReply(_OpenAIReply):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, model: str, tokenizer: Tokenizer, options: ReplyOptions) -> None:
        super().__init__(model, tokenizer, options)
        self._begun: set[int] = set()
        """The choices whose role has been told."""

    def event(self, delta: Delta, usage: Usage) -> bytes:
        first = b""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            blank = Delta(id=delta.id, epoch=delta.epoch, start_index=delta.start_index, choice=delta.choice)
            first = self._chunk(blank, {"delta": {"role": "assistant", "content": ""}}, None)
        if self._is_silent(delta):
            return first
        content = {"delta": {"content": delta.text} if delta.text else {}}
        return first + self._chunk(delta, content, self._texts[delta.choice].chat_logprobs(delta.logprobs))

    def _shown(self, output: Output, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {"message": message, "logprobs": TokenTexts(self._tokenizer).chat_logprobs(logprobs)}


def _finish(delta: Delta) -> dict[str, Any]:
    if delta.finish is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
