"""Runs of a whole service that are the same step by step each time: virtual time, and Trio's scheduler seeded."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import trio
import trio.testing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


def replay(
    seed: int,
    fn: Callable[..., Awaitable[Any]],
    *args: object,
    name: object,
    instruments: Sequence[trio.abc.Instrument] = (),
) -> Any:
    """What `fn(*args)` returns. What it raises gets `name`, by which the run can be repeated, as a note."""
    scheduler = trio._core._run
    random.seed(seed)
    scheduler._r.seed(seed)
    before, scheduler._ALLOW_DETERMINISTIC_SCHEDULING = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, True
    logging.disable(logging.CRITICAL)
    try:
        return trio.run(fn, *args, clock=trio.testing.MockClock(autojump_threshold=0), instruments=instruments)
    except BaseException as error:
        error.add_note(f"to replay: {name}")
        raise
    finally:
        logging.disable(logging.NOTSET)
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before
