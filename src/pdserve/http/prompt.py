"""Prompts to exact token ids: the one place where text is tokenised, once a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from pdserve.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.http.fields import Fields
    from pdserve.text.template import ChatTemplate
    from pdserve.text.tokenizer import Tokenizer

_INLINE_CHARS = 50_000
"""Longer texts are tokenised in a thread: they would stall every other stream for tens of milliseconds."""


class Prompts:
    """Reads the prompt of any endpoint's request."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._threads = trio.CapacityLimiter(2)

    async def read(self, fields: Fields, name: str) -> tuple[int, ...]:
        """A string, a list of token ids, or a list of one of these. Raises InvalidRequestError naming `name`."""
        value = fields.get(name)
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            if len(value) > 1:
                raise fields.invalid(name, "one prompt a request; send several requests for several prompts")
            value = value[0]
        if value is None or value == "" or value == []:
            raise fields.invalid(name, "must not be empty")
        if isinstance(value, str):
            return tuple(await self.encode(value))
        if not isinstance(value, list):
            raise fields.invalid(name, "must be a string or a list of token ids")
        return fields.as_token_ids(name, value, vocab_size=self.tokenizer.vocab_size)

    async def read_chat(self, fields: Fields, *, add_generation_prompt: bool = True) -> tuple[int, ...]:
        """`messages`, rendered through the model's chat template."""
        template = self._template
        if template is None:
            raise fields.invalid("messages", "this model has no chat template; use /v1/completions")
        messages = _messages(fields)

        def render() -> list[int]:
            text = template.render(messages, add_generation_prompt=add_generation_prompt)
            # No BOS: the template spells out its own.
            return self.tokenizer.encode(text, special=True)

        ids = tuple(await self._run(render, sum(len(message["content"]) for message in messages)))
        if not ids:
            raise fields.invalid("messages", "must not be empty")
        return ids

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Control tokens spelled out in the text become their ids; BOS is put in front where the model wants one."""

        def encode() -> list[int]:
            ids = self.tokenizer.encode(text, special=True)
            bos = self.tokenizer.bos_token_id
            if add_special_tokens and self.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
                ids.insert(0, bos)
            return ids

        return await self._run(encode, len(text))

    async def _run(self, work: Callable[[], list[int]], chars: int) -> list[int]:
        if chars <= _INLINE_CHARS:
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._threads)


def _messages(fields: Fields) -> Sequence[dict[str, Any]]:
    """The messages with every content as one string, which is what chat templates expect."""
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise fields.invalid("messages", "must be a list of at least one message")
    return [_message(index, message) for index, message in enumerate(value)]


def _message(index: int, message: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object", param="messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role must be a string", param="messages")
    if content is None and role == "assistant":
        content = ""
    elif isinstance(content, list):
        content = "".join(_part(where, part) for part in content)
    elif not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be a string or a list of text parts", param="messages")
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _part(where: str, part: Any) -> str:  # noqa: ANN401 - JSON
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError(f"{where}.content: this model takes only parts of type text", param="messages")
