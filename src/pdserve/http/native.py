"""LightLLM's endpoints: `/generate`, `/generate_stream`, and the tokenizer's own two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.http.choices import Outputs
from pdserve.http.exchange import to_json
from pdserve.http.fields import Fields
from pdserve.http.reply import Job, sse
from pdserve.http.sampling import output_length, read_choices, sampling_params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.http.choices import Choices, Output
    from pdserve.http.prompt import Prompts
    from pdserve.http.reply import Usage
    from pdserve.master.service import MasterService
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.wire.messages import Delta

_DEFAULT_NEW_TOKENS = 16


class Native:
    """Parses LightLLM's requests. Every method raises errors.RequestError."""

    def __init__(self, service: MasterService, prompts: Prompts) -> None:
        self._service = service
        self._prompts = prompts

    async def generate(self, fields: Fields) -> Job:
        return await self._parse(fields, stream=False)

    async def generate_stream(self, fields: Fields) -> Job:
        return await self._parse(fields, stream=True)

    async def tokenize(self, fields: Fields) -> dict[str, Any]:
        """`prompt` or `messages` to ids; empty text gives none."""
        special = fields.boolean("add_special_tokens", default=True)
        if fields.get("messages") is not None:
            ids = list(
                await self._prompts.read_chat(
                    fields, add_generation_prompt=fields.boolean("add_generation_prompt", default=True)
                )
            )
        else:
            text = fields.text("prompt")
            if text is None:
                raise fields.invalid("prompt", "prompt or messages is needed")
            ids = await self._prompts.encode(text, add_special_tokens=special)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._service.card.max_len}

    async def detokenize(self, fields: Fields) -> dict[str, Any]:
        if fields.get("tokens") is None:
            raise fields.invalid("tokens", "is needed")
        ids = fields.token_ids("tokens", vocab_size=self._prompts.tokenizer.vocab_size)
        return {"prompt": self._prompts.tokenizer.decode(ids, skip_special=False)}

    async def _parse(self, fields: Fields, *, stream: bool) -> Job:
        parameters = fields.nested("parameters") or Fields({}, "parameters.")
        choices = read_choices(parameters, stream=stream, capacity=self._service.max_capacity)
        prompt_ids = await self._prompts.read(fields, "inputs")
        max_tokens = output_length(
            parameters,
            ("max_new_tokens",),
            prompt="inputs",
            prompt_tokens=len(prompt_ids),
            max_len=self._service.card.max_len,
            default=_DEFAULT_NEW_TOKENS,
        )
        params = sampling_params(
            parameters,
            max_tokens=max_tokens,
            vocab_size=self._prompts.tokenizer.vocab_size,
            logprobs=0,  # LightLLM's tokens always carry the chosen one's; it takes no more to rank choices
            stop="stop_sequences",
            min_tokens="min_new_tokens",
            greedy=not parameters.boolean("do_sample"),
        )
        reply = NativeReply(self._prompts.tokenizer, choices, details=parameters.boolean("return_details"))
        return Job(prompt_ids, params, stream, reply, choices)


class NativeReply:
    """LightLLM's shapes, plus the output position `index` of every token. See `Reply`.

    As with LightLLM, with n > 1 a document's `count_output_tokens`, `finish_reason` and `tokens` are lists like
    `generated_text`, one item a choice; they are those of the choices shown. A stream's events have `choice` then, the
    index of theirs, which is no part of LightLLM's shape; `token.index` stays the position within that choice.
    """

    def __init__(self, tokenizer: Tokenizer, choices: Choices, *, details: bool = False) -> None:
        self._tokenizer = tokenizer
        self._several = choices.n > 1
        self._details = details
        self._outputs = Outputs(choices)

    def event(self, delta: Delta, usage: Usage) -> bytes:
        """One event a token; the last one of the delta carries its text and finish."""
        tokens = list(self._split(delta))
        events = []
        for token in tokens:
            finish = delta.finish if token is tokens[-1] else None
            document: dict[str, Any] = {
                "token": {**token, "prompt_tokens": usage.prompt},
                "generated_text": None,
                "finished": finish is not None,
                "finish_reason": finish,
                "details": None,
            }
            if self._several:
                document["choice"] = delta.choice
            events.append(sse(to_json(document), prefix=b"data:"))
        return b"".join(events)

    def tail(self, usage: Usage) -> bytes:
        """The event with `finished: true` is the end; LightLLM's clients take every event for JSON."""
        return b""

    def add(self, delta: Delta) -> None:
        self._outputs.add(delta)

    def document(self, usage: Usage) -> dict[str, Any]:
        outputs = self._outputs.chosen()
        document: dict[str, Any] = {
            "generated_text": [output.text for output in outputs],
            "count_output_tokens": self._each([len(output.token_ids) for output in outputs]),
            "finish_reason": self._each([output.deltas[-1].finish for output in outputs]),
            "prompt_tokens": usage.prompt,
        }
        if self._details:
            document["tokens"] = self._each([self._tokens(output) for output in outputs])
        return document

    def _each(self, values: list[Any]) -> Any:  # noqa: ANN401 - JSON
        return values if self._several else values[0]

    def _tokens(self, output: Output) -> list[dict[str, Any]]:
        return [token for delta in output.deltas for token in self._split(delta) if token["id"] is not None]

    def _split(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """A token without id stands for a delta that brings only text or the finish."""
        ids: tuple[int | None, ...] = delta.token_ids
        if not ids and (delta.text or delta.finish):
            ids = (None,)
        for offset, token_id in enumerate(ids):
            index = delta.start_index + offset
            yield {
                "id": token_id,
                "text": delta.text if offset == len(ids) - 1 else "",
                "logprob": delta.logprobs[offset].logprob if offset < len(delta.logprobs) else None,
                "special": token_id is not None and self._tokenizer.is_special(token_id),
                "count_output_tokens": index if token_id is None else index + 1,
                "index": index,
            }
