"""A snapshot of the live task tree: what runs, and which nursery owns it."""

from __future__ import annotations

from typing import Any

import trio

# Far deeper than the real tree, and shallow enough for any JSON encoder.
MAX_DEPTH = 64


def snapshot(root: trio.lowlevel.Task | None = None) -> dict[str, Any]:
    """The tree below `root` (default: the whole trio run), ready for JSON: `{"name": …, "nurseries": [[child, …], …]}`.

    Nurseries are listed from the outermost in, children by name. Trio's own tasks are left out. What is below
    `MAX_DEPTH` is replaced by `"truncated": true`. To be called inside the run; no checkpoint.
    """
    top = root if root is not None else trio.lowlevel.current_root_task()
    assert top is not None  # only while a run sets itself up
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
            for child in sorted(nursery.child_tasks, key=_name):
                if child.name.startswith("<"):  # trio's own, as <TrioToken.run_sync_soon task>
                    continue
                children.append({})
                stack.append((child, children[-1], depth + 1))
            if children:
                node["nurseries"].append(children)
    return tree


def _name(task: trio.lowlevel.Task) -> str:
    """Readable: `pdserve.worker.link.run`, or the name given at the start. The root of the run is called "trio"."""
    return "trio" if task.parent_nursery is None else task.name.replace(".<locals>", "")
