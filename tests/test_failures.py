"""docs/failures.md lists every kind of failure with the tests that are marked with its number, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
KINDS = set(range(1, 35))
LATER = {9, 10, 11}
"""Come with the recovery of requests that have lost their KV."""


def marks(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """The numbers n of its `@pytest.mark.failure(n)`."""
    for decorator in function.decorator_list:
        match decorator:
            case ast.Call(func=ast.Attribute(attr="failure"), args=[ast.Constant(value=int(number))]):
                yield number


def marked() -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for number in marks(node):
                    found.setdefault(number, set()).add(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found


def listed() -> dict[int, set[str]]:
    text = (ROOT / "docs" / "failures.md").read_text()
    _, *entries = re.split(r"^\*\*(\d+)\.\*\* ", text, flags=re.MULTILINE)
    numbers = [int(number) for number in entries[::2]]
    assert len(numbers) == len(set(numbers)), "a number is there twice"
    return {
        number: set(re.findall(r"`(tests/[^`]+::\w+)`", entry))
        for number, entry in zip(numbers, entries[1::2], strict=True)
    }


def test_the_document_lists_the_marked_tests_by_number_and_only_what_comes_later_is_missing():
    assert listed() == marked()
    assert KINDS - set(listed()) == LATER
    assert set(listed()) <= KINDS
