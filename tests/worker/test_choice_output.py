"""Tokens of one choice become contiguous deltas, whole characters, and one end."""

from __future__ import annotations

import pytest

from pdserve.text.models import resolve_model
from pdserve.text.tokenizer import load_tokenizer
from pdserve.wire.messages import Decode, Delta, SamplingParams, TokenLogprob
from pdserve.worker.output import ChoiceOutput

TOKENIZER = load_tokenizer(resolve_model("sim-bytes"))


class Sink:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def emit(self, delta: Delta) -> None:
        self.deltas.append(delta)


def output(**params):
    sink = Sink()
    frame = Decode("r", 2, (65,), SamplingParams(max_tokens=99, **params), b"", choice=1)
    return ChoiceOutput(frame, TOKENIZER, sink), sink.deltas


def feed(choice: ChoiceOutput, text: str, last: str | None = None) -> list[bool]:
    data = text.encode()
    return [choice.push(b, None, last if i == len(data) - 1 else None, None) for i, b in enumerate(data)]


def test_every_id_is_emitted_once_in_order_and_a_character_in_one_piece():
    choice, deltas = output()
    assert feed(choice, "a\U0001f600b", "length") == [False] * 5 + [True]
    assert [d.start_index for d in deltas] == list(range(6))
    assert tuple(d.token_ids[0] for d in deltas) == tuple("a\U0001f600b".encode())
    assert [d.text for d in deltas] == ["a", "", "", "", "\U0001f600", "b"]
    assert [d.finish for d in deltas] == [None] * 5 + ["length"]
    assert {(d.id, d.epoch, d.choice) for d in deltas} == {("r", 2, 1)}
    assert choice.finished


def test_a_stop_string_ends_the_choice_and_nothing_of_it_is_shown():
    choice, deltas = output(stop=("END",))
    assert feed(choice, "xEND") == [False, False, False, True]
    assert "".join(d.text for d in deltas) == "x"
    assert (deltas[-1].finish, deltas[-1].stop_reason) == ("stop", "END")


def test_a_beginning_of_a_stop_string_is_shown_in_the_end():
    choice, deltas = output(stop=("END",))
    feed(choice, "xEN", "length")
    assert "".join(d.text for d in deltas) == "xEN"


def test_a_stop_string_completed_by_the_last_token_is_a_stop():
    choice, deltas = output(stop=("END",))
    feed(choice, "END", "length")
    assert (deltas[-1].finish, "".join(d.text for d in deltas)) == ("stop", "")


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_half_a_character_at_the_end_is_a_replacement_character(finish):
    choice, deltas = output()
    choice.push("é".encode()[0], None, finish, None)
    assert (deltas[0].text, deltas[0].finish) == ("\ufffd", finish)


def test_logprobs_and_the_stop_id_are_passed_on():
    choice, deltas = output()
    logprob = TokenLogprob(65, -0.5)
    assert choice.push(65, logprob, "stop", 65)
    assert (deltas[0].logprobs, deltas[0].stop_reason) == ((logprob,), 65)
