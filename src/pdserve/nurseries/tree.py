"""A snapshot of the live task tree: what runs, and which nursery owns it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Iterable

# Far deeper than the real tree, and shallow enough for any JSON encoder.
MAX_DEPTH = 64


def snapshot(root: trio.lowlevel.Task | None = None) -> dict[str, Any]:
    """The tree below `root` (default: the whole trio run), ready for JSON: `{"name": …, "nurseries": [[child, …], …]}`.

    Nurseries are listed from the outermost in, children by name. Trio's own tasks are left out, what runs below them is
    not. What is below `MAX_DEPTH` is replaced by `"truncated": true`. To be called inside the run; no checkpoint.
    """
    top = root if root is not None else trio.lowlevel.current_root_task()
    if top is None:
        raise RuntimeError("the run has not begun")
    tree: dict[str, Any] = {}
    stack = [(top, tree, 0)]
    while stack:
        task, node, depth = stack.pop()
        node["name"] = _name(task)
        node["nurseries"] = []
        if depth == MAX_DEPTH:
            node["truncated"] = True
            continue
        for nursery in task.child_nurseries:
            children: list[dict[str, Any]] = []
            for child in sorted(_visible(nursery.child_tasks), key=_name):
                children.append({})
                stack.append((child, children[-1], depth + 1))
            if children:
                node["nurseries"].append(children)
    return tree


def _visible(tasks: Iterable[trio.lowlevel.Task]) -> list[trio.lowlevel.Task]:
    """The tasks, those of trio itself replaced by what runs below them."""
    visible = []
    stack = list(tasks)
    while stack:
        task = stack.pop()
        if task.name.startswith("trio._core."):
            stack.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)
        else:
            visible.append(task)
    return visible


def _name(task: trio.lowlevel.Task) -> str:
    if task is trio.lowlevel.current_root_task():
        return "trio"
    return task.name.replace(".<locals>", "")
