"""When Python's garbage collector runs in a serving process: rarely, and not over what is there for good."""

from __future__ import annotations

import gc

_THRESHOLDS = (20_000, 10, 10)
"""With Python's default of 700 objects a pass over the middle generation comes several times a second and holds up
every stream for some 10 ms. What a connection or a failure leaves in cycles still goes within minutes."""


def relax() -> None:
    """To be called once a process is ready to serve: what exists now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
