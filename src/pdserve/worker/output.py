"""One choice's output on its way to the Master: tokens become deltas, stop strings end it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.text.detokenizer import Detokenizer
from pdserve.wire.messages import Delta

if TYPE_CHECKING:
    from pdserve.text.tokenizer import Tokenizer
    from pdserve.wire.messages import Decode, FinishReason, TokenLogprob
    from pdserve.worker.requests import LinkRequests


class ChoiceOutput:
    """Emits every token id exactly once, in order, and exactly one terminal delta."""

    def __init__(self, frame: Decode, tokenizer: Tokenizer, link: LinkRequests) -> None:
        self._frame = frame
        self._link = link
        self._text = Detokenizer(tokenizer, frame.params)
        self._index = 0
        self.finished = False

    def push(
        self,
        token_id: int,
        logprob: TokenLogprob | None,
        finish: FinishReason | None,
        stop_reason: int | str | None,
    ) -> bool:
        """Emit one token; True when the choice is over, for the given reason or because of a stop string."""
        text = self._text.push(token_id)
        if finish is not None and self._text.stopped is None:
            text += self._text.finish()
        if self._text.stopped is not None:
            finish, stop_reason = "stop", self._text.stopped
        frame = self._frame
        self._link.emit(
            Delta(
                frame.id,
                frame.epoch,
                self._index,
                (token_id,),
                text,
                () if logprob is None else (logprob,),
                finish,
                stop_reason,
                frame.choice,
            )
        )
        self._index += 1
        self.finished = finish is not None
        return self.finished
