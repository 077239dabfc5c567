"""Text of one output, token by token: whole characters only, cut at stop strings."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from pdserve.text.stops import StopMatcher

if TYPE_CHECKING:
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.wire.messages import SamplingParams

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the tokens of one choice into text; the sum of what it returns does not depend on how it is streamed.

    Special tokens yield no text. Bytes that are not UTF-8 become U+FFFD. Each push costs time linear in its own text
    times the number of stop strings, not in the output so far.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._characters = _Utf8Decoder(errors="replace")
        self._stops = StopMatcher(params.stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the output; all text before it has then been returned, and nothing after it is."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Take one output token, return the text that is now certain (often none).

        A stop string counts if the token that completes it is output token number `min_tokens` or a later one.
        """
        self._tokens += 1
        text = self._characters.decode(self._tokenizer.token_bytes(token_id))
        return self._stops.feed(text, armed=self._tokens >= self._min_tokens)

    def finish(self) -> str:
        """The output ended otherwise: what is still held back, an incomplete character as U+FFFD. Idempotent."""
        rest = self._characters.decode(b"", final=True)
        return self._stops.feed(rest, armed=self._tokens >= self._min_tokens) + self._stops.flush()
