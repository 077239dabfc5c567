"""What a client may see of a request while processes die: success, or one explicit error. Everything else is told apart
here, and nothing that is wrong has a name other than `Violation`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from chaos.client import document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chaos.client import Answer

ERRORS = (429, 502, 503, 504)
"""Statuses that are an honest answer to a valid request. 400 would blame the client, 500 is a bug."""


class Violation(AssertionError):
    """A client saw what no client may see."""


def judge(answer: Answer, expected: Sequence[Sequence[int]], *, left: bool, may_break: bool) -> str:
    """How the request ended, in a few words. Raises `Violation`.

    `expected`: all token ids of each choice. `left`: the client has gone before the end. `may_break`: its Master was
    taken away meanwhile, so that the connection may be broken. What came before must be right in any case.
    """
    if answer.status not in (None, 200):
        return _refused(answer, left or (may_break and bool(answer.broken)))
    finished = _finished(answer, expected)
    if left:
        return "left"
    if answer.broken:
        _require(may_break, answer, f"the connection broke ({answer.broken}) though its Master lived")
        return "broken with its Master"
    _require(answer.complete and not answer.rest, answer, "the response is cut off")
    of_all = [event["error"] for event in answer.events if "error" in event and not _choice(event["error"])]
    of_choices = Counter(_choice(event["error"]) for event in answer.events if _choice(event.get("error")))
    failed = {int(name) for name in of_choices}
    _require(max(of_choices.values(), default=1) == 1, answer, "two errors of one choice")
    _require(not finished & failed, answer, "a choice finished and failed")
    if answer.done:
        _require(not of_all and not failed, answer, "[DONE] after an error")
        _require(finished == set(range(len(expected))), answer, "[DONE] though a choice has not finished")
        return "complete"
    unfinished = set(range(len(expected))) - finished - failed
    if of_all:
        _require(
            len(of_all) == 1 and "error" in answer.events[-1], answer, "more than one error, or one not at the end"
        )
        _require(bool(unfinished), answer, "an error though every choice has ended")
        return "error in the stream"
    _require(bool(failed), answer, "a stream that ends without [DONE] and without an error")
    _require(not unfinished, answer, "a choice that just stops")
    return "error of a choice"


def _refused(answer: Answer, cut: bool) -> str:
    if not cut:
        error = document(answer).get("error", {})
        _require(answer.complete, answer, f"the answer is cut off ({answer.broken})")
        _require(answer.status in ERRORS, answer, "not a status for a valid request")
        _require(bool(error.get("message")) and bool(error.get("type")), answer, "an error that says nothing")
    return str(answer.status)


def _finished(answer: Answer, expected: Sequence[Sequence[int]]) -> set[int]:
    """The choices that have finished. The ids of all must be contiguous and as expected, with nothing after the end."""
    ids: list[list[int]] = [[] for _ in expected]
    finished: set[int] = set()
    for event in answer.events:
        for choice in event.get("choices", ()):
            index, mine = choice["index"], ids[choice["index"]]
            _require(index not in finished, answer, f"choice {index} goes on after its end")
            _require(not choice["token_ids"] or choice["start_index"] == len(mine), answer, f"a gap in choice {index}")
            mine += choice["token_ids"]
            _require(mine == list(expected[index][: len(mine)]), answer, f"wrong tokens in choice {index}: {mine}")
            if choice["finish_reason"] is not None:
                _require(choice["finish_reason"] == "length", answer, f"choice {index} ends for another reason")
                _require(len(mine) == len(expected[index]), answer, f"choice {index} finished after {len(mine)} tokens")
                finished.add(index)
    return finished


def _choice(error: dict | None) -> str:
    """The number of the choice that an error names, as text; empty for an error of the whole request."""
    match = re.fullmatch(r"choices\[(\d+)\]", (error or {}).get("param") or "")
    return match[1] if match else ""


def _require(holds: bool, answer: Answer, what: str) -> None:
    if not holds:
        tail = answer.events[-2:] or answer.rest[-500:]
        raise Violation(f"{what}; status {answer.status}, {len(answer.events)} events, the last: {tail}")
