from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.bytelevel import ByteTokenizer
from pdserve.text.detokenizer import Detokenizer
from pdserve.wire.messages import SamplingParams

tokenizer = ByteTokenizer()


def pieces(ids, tok=tokenizer, **params):
    detokenizer = Detokenizer(tok, SamplingParams(**params))
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()], detokenizer.stopped


@given(st.lists(st.integers(0, 258), max_size=60))
def test_any_bytes_stream_to_the_same_text_as_at_once(ids):
    shown, stopped = pieces(ids)
    assert "".join(shown) == tokenizer.decode(ids)
    assert stopped is None


def test_emoji_of_several_tokens_arrives_in_one_piece(smollm2):
    ids = smollm2.encode("ok 🎉")
    shown, _ = pieces(ids, smollm2)
    assert len(ids) > len("ok 🎉") - 1
    assert [text for text in shown if not text.isascii()] == ["🎉"]
    assert "".join(shown) == "ok 🎉"


def test_incomplete_character_is_replaced_at_the_end_only():
    shown, _ = pieces("é".encode()[:1])
    assert shown == ["", "�"]


def test_finish_is_idempotent():
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("ab",)))
    detokenizer.push(ord("a"))
    assert (detokenizer.finish(), detokenizer.finish()) == ("a", "")


def test_special_tokens_yield_no_text_even_inside_a_character():
    assert "".join(pieces([257, 0xC3, 256, 0xA9, 258])[0]) == "é"


def test_text_is_cut_before_the_stop_string_and_nothing_follows():
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("END", "E!")))
    shown = [detokenizer.push(i) for i in b"one EEND two"]
    assert "".join(shown) + detokenizer.finish() == "one E"
    assert detokenizer.stopped == "END"
    assert shown[4:] == ["", "E", "", "", "", "", "", ""]


def test_held_back_text_is_flushed_at_a_normal_end():
    shown, stopped = pieces(b"one EN", stop=("END",))
    assert shown[-1] == "EN"
    assert "".join(shown) == "one EN"
    assert stopped is None


def test_stop_string_that_only_the_end_decides_counts():
    shown, stopped = pieces(b"xabc", stop=("abcd", "bc"))
    assert ("".join(shown), stopped) == ("xa", "bc")


def test_min_tokens_delays_stop_strings():
    assert pieces(b"a.b.c", stop=(".",), min_tokens=2)[1] == "."
    assert "".join(pieces(b"a.b.c", stop=(".",), min_tokens=2)[0]) == "a"
    assert "".join(pieces(b"a.b.c", stop=(".",), min_tokens=3)[0]) == "a.b"
    assert "".join(pieces(b"a.b.c", stop=(".",), min_tokens=5)[0]) == "a.b.c"
    assert "".join(pieces(b"ab##c", stop=("##",), min_tokens=4)[0]) == "ab"


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3))
def test_stop_strings_of_any_characters(text, stops):
    shown, stopped = pieces(tokenizer.encode(text), stop=tuple(stops))
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    expected = (text[: min(found)[0]], min(found)[2]) if found else (text, None)
    assert ("".join(shown), stopped) == expected
