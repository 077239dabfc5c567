"""Stop strings over a stream of text, in time linear in the text, whatever way it is cut into pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the stop string that begins first; the result does not depend on how the text is split.

    One Knuth-Morris-Pratt automaton per stop string: its state is the length of the longest suffix of the text so far
    that is a prefix of that string, so exactly the longest of these is held back. Empty stop strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self._found: tuple[int, str] | None = None
        """A complete stop string and its start in `_held`; another that begins before it may still become complete."""
        self.matched: str | None = None
        """The stop string that ended the text. Nothing is given out any more once it is set."""

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take the next piece of text, return what is safe to show.

        A stop string that becomes complete while not `armed` is text like any other.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        end = len(self._held)
        self._held += text
        for char in text:
            end += 1
            self._advance(char, end, armed)
            if self._found and all(end - state >= self._found[0] for state in self._states):
                return self._settle()
        safe = end - max(self._states)
        if self._found:
            start, stop = self._found
            safe = min(safe, start)
            self._found = start - safe, stop
        out, self._held = self._held[:safe], self._held[safe:]
        return out

    def flush(self) -> str:
        """The text is over: what was held back, cut before a stop string that is complete (`matched` is then set)."""
        if self._found:
            return self._settle()
        out, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return out

    def _advance(self, char: str, end: int, armed: bool) -> None:
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            state = self._states[i]
            while state and stop[state] != char:
                state = borders[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                start = end - state
                if armed and (self._found is None or start < self._found[0]):
                    self._found = start, stop
                state = borders[state]
            self._states[i] = state

    def _settle(self) -> str:
        assert self._found is not None
        start, self.matched = self._found
        out, self._held, self._found = self._held[:start], "", None
        return out


def _borders(pattern: str) -> list[int]:
    """borders[k]: length of the longest proper suffix of pattern[:k] that is also its prefix (0 for k < 2)."""
    borders = [0, 0]
    state = 0
    for char in pattern[1:]:
        while state and pattern[state] != char:
            state = borders[state]
        if pattern[state] == char:
            state += 1
        borders.append(state)
    return borders
