import json

import pytest
import trio

from pdserve.nurseries.tree import MAX_DEPTH, snapshot


async def leaf():
    await trio.sleep_forever()


class Branch:
    async def run(self):
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            outer.start_soon(leaf, name="outer leaf")
            inner.start_soon(leaf)
            inner.start_soon(trio.sleep_forever)


@pytest.mark.trio
async def test_names_and_nurseries_of_a_subtree(autojump_clock):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Branch().run)
        await trio.testing.wait_all_tasks_blocked()
        tree = snapshot(trio.lowlevel.current_task())
        nursery.cancel_scope.cancel()
    [[branch]] = tree["nurseries"]
    assert branch["name"].endswith("test_tree.Branch.run")
    outer, inner = branch["nurseries"]
    assert [child["name"] for child in outer] == ["outer leaf"]
    names = [child["name"] for child in inner]
    assert names[0].endswith("test_tree.leaf")
    assert names[1].startswith("trio.")  # a task of ours, though its code is trio's
    assert inner[0]["nurseries"] == []


def names(tree):
    yield tree["name"]
    for nursery in tree["nurseries"]:
        for child in nursery:
            yield from names(child)


def test_whole_run_without_trios_own_tasks():
    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaf)
            await trio.testing.wait_all_tasks_blocked()
            tree = snapshot()
            nursery.cancel_scope.cancel()
        return tree

    tree = trio.run(main)
    json.dumps(tree)
    assert tree["name"] == "trio"
    found = list(names(tree))
    assert any(name.endswith("test_whole_run_without_trios_own_tasks.main") for name in found)  # no "<locals>"
    assert any(name.endswith("test_tree.leaf") for name in found)
    assert not any(name.startswith("<") for name in found)


@pytest.mark.trio
async def test_a_very_deep_tree_is_cut(autojump_clock):
    async def nest(depth):
        async with trio.open_nursery() as nursery:
            if depth:
                nursery.start_soon(nest, depth - 1)
            else:
                nursery.start_soon(leaf)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(nest, MAX_DEPTH + 20)
        await trio.testing.wait_all_tasks_blocked()
        tree = snapshot(trio.lowlevel.current_task())
        nursery.cancel_scope.cancel()
    json.dumps(tree)
    depth = 0
    while tree["nurseries"]:
        tree = tree["nurseries"][0][0]
        depth += 1
    assert depth == MAX_DEPTH
    assert tree["truncated"]


def test_outside_a_run():
    with pytest.raises(RuntimeError):
        snapshot()
