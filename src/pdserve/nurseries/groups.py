"""Exception groups are split at the borders (connection, supervisor) only; this is how."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def leaves(exc: BaseException) -> Iterator[BaseException]:
    """The exceptions in a (nested) group, first raised first; an exception that is no group is its own leaf."""
    stack = [exc]
    while stack:
        top = stack.pop()
        if isinstance(top, BaseExceptionGroup):
            stack.extend(reversed(top.exceptions))
        else:
            yield top
