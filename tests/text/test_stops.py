from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.stops import StopMatcher


def run(stops, pieces):
    matcher = StopMatcher(stops)
    shown = [matcher.feed(piece) for piece in pieces]
    return "".join(shown) + matcher.flush(), matcher.matched


def naive(stops, text):
    """The first to begin wins; of two that begin together the shorter one, it is complete first."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


texts = st.text(alphabet="ab", max_size=40)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text(alphabet="ab", max_size=4), max_size=20),
)
def test_same_as_find_over_the_whole_text(stops, pieces):
    assert run(stops, pieces) == naive(stops, "".join(pieces))


@given(st.text(alphabet="abc", min_size=1, max_size=6), texts)
def test_holds_back_exactly_the_longest_possible_beginning(stop, text):
    matcher = StopMatcher([stop])
    shown = matcher.feed(text)
    if matcher.matched is None:
        prefixes = [stop[:k] for k in range(len(stop)) if text.endswith(stop[:k])]
        assert text == shown + max(prefixes, key=len)


def test_longer_stop_that_began_first_wins_when_it_completes():
    assert run(["abcd", "bc"], list("xabcd")) == ("x", "abcd")


@pytest.mark.parametrize("pieces", [["xabce"], ["xab", "ce"], list("xabce")])
def test_inner_stop_wins_when_the_outer_one_fails(pieces):
    assert run(["abcd", "bc"], pieces) == ("xa", "bc")


def test_inner_stop_wins_when_the_text_ends():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.feed("xabc") == "x"
    assert matcher.matched is None
    assert matcher.flush() == "a"
    assert matcher.matched == "bc"


def test_nothing_after_a_match():
    matcher = StopMatcher(["."])
    assert matcher.feed("one. two") == "one"
    assert (matcher.feed("three"), matcher.flush(), matcher.matched) == ("", "", ".")


def test_flush_is_idempotent_and_leaves_no_state():
    matcher = StopMatcher(["ab"])
    assert matcher.feed("xa") == "x"
    assert (matcher.flush(), matcher.flush()) == ("a", "")
    assert matcher.feed("b") == "b"


def test_no_or_empty_stops_let_everything_through():
    assert run([], ["a", "b"]) == ("ab", None)
    assert run(["", ""], ["a", "b"]) == ("ab", None)


def test_unarmed_completion_is_text_but_a_straddling_one_counts():
    matcher = StopMatcher(["##"])
    assert matcher.feed("a##b#", armed=False) == "a##b"
    assert matcher.feed("#c") == ""
    assert matcher.matched == "##"


def test_hostile_repetition_stays_linear():
    stop = "a" * 2000 + "b"
    matcher = StopMatcher([stop])
    shown = "".join(matcher.feed("a" * 100) for _ in range(1000))
    assert len(shown) == 100_000 - 2000
    assert matcher.feed("b") == ""
    assert matcher.matched == stop
