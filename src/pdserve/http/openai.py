"""OpenAI's requests: validated, tokenised once, and paired with the shape of their response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import UnknownModelError
from pdserve.http.openai_reply import ChatReply, CompletionReply, ReplyOptions
from pdserve.http.reply import Job
from pdserve.http.sampling import MAX_LOGPROBS, output_length, read_choices, sampling_params

if TYPE_CHECKING:
    from pdserve.http.choices import Choices
    from pdserve.http.fields import Fields
    from pdserve.http.prompt import Prompts
    from pdserve.master.service import MasterService
    from pdserve.wire.messages import SamplingParams

_DEFAULT_COMPLETION_TOKENS = 16


class OpenAI:
    """Parses `/v1/completions` and `/v1/chat/completions`. Every method raises errors.RequestError."""

    def __init__(self, service: MasterService, prompts: Prompts, model_name: str) -> None:
        self._service = service
        self._prompts = prompts
        self._vocab_size = prompts.tokenizer.vocab_size
        self._model_name = model_name

    async def completions(self, fields: Fields) -> Job:
        self._check_common(fields)
        if fields.boolean("echo"):
            raise fields.invalid("echo", "is not supported")
        if fields.text("suffix"):
            raise fields.invalid("suffix", "is not supported")
        logprobs = fields.integer("logprobs", low=0, high=MAX_LOGPROBS)
        stream, options = self._options(fields, logprobs)
        prompt_ids = await self._prompts.read(fields, "prompt")
        max_tokens = output_length(
            fields,
            ("max_tokens",),
            prompt="prompt",
            prompt_tokens=len(prompt_ids),
            max_len=self._service.card.max_len,
            default=_DEFAULT_COMPLETION_TOKENS,
        )
        reply = CompletionReply(self._model_name, self._prompts.tokenizer, options)
        params = self._params(fields, max_tokens, logprobs, options.choices)
        return Job(prompt_ids, params, stream, reply, options.choices)

    async def chat(self, fields: Fields) -> Job:
        self._check_common(fields)
        for name in ("tools", "functions"):
            if fields.get(name):
                raise fields.invalid(name, "is not supported")
        response_format = fields.nested("response_format")
        if response_format is not None and response_format.text("type") not in (None, "text"):
            raise fields.invalid("response_format", "only the type text is supported")
        logprobs = _chat_logprobs(fields)
        stream, options = self._options(fields, logprobs)
        prompt_ids = await self._prompts.read_chat(fields)
        max_tokens = output_length(
            fields,
            ("max_completion_tokens", "max_tokens"),
            prompt="messages",
            prompt_tokens=len(prompt_ids),
            max_len=self._service.card.max_len,
            default=self._service.output_room(len(prompt_ids), options.choices.best_of),
        )
        reply = ChatReply(self._model_name, self._prompts.tokenizer, options)
        params = self._params(fields, max_tokens, logprobs, options.choices)
        return Job(prompt_ids, params, stream, reply, options.choices)

    def _check_common(self, fields: Fields) -> None:
        model = fields.text("model")
        if model is not None and model != self._model_name:
            raise UnknownModelError(f"model {model!r} is not served here; {self._model_name!r} is", param="model")
        if fields.get("logit_bias"):
            raise fields.invalid("logit_bias", "is not supported")

    def _options(self, fields: Fields, logprobs: int | None) -> tuple[bool, ReplyOptions]:
        """Whether it is a stream, and what the response shows."""
        stream = fields.boolean("stream")
        choices = read_choices(fields, stream=stream, capacity=self._service.max_capacity)
        options = fields.nested("stream_options")
        if options is not None and not stream:
            raise fields.invalid("stream_options", "needs stream to be true")
        return stream, ReplyOptions(
            choices=choices,
            logprobs=logprobs is not None,
            include_usage=options.boolean("include_usage") if options is not None else False,
            token_ids=fields.boolean("return_token_ids"),
        )

    def _params(self, fields: Fields, max_tokens: int, logprobs: int | None, choices: Choices) -> SamplingParams:
        """`logprobs` as the client has asked for them; to rank choices takes those of the chosen tokens at least."""
        if logprobs is None and choices.ranked:
            logprobs = 0
        return sampling_params(fields, max_tokens=max_tokens, vocab_size=self._vocab_size, logprobs=logprobs)


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", low=0, high=MAX_LOGPROBS)
    if top is not None and not wanted:
        raise fields.invalid("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None
