"""Which nodes a request gets."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.master.registry import Node
from pdserve.master.selector import Selector
from pdserve.wire.footprint import Footprint
from pdserve.wire.messages import Hello, KvLayout, ModelCard, NodeStats, TransferMetadata

LAYOUT = KvLayout(16, 128, 1, 1, 1, "sim")


def node(node_id: str, role: str = "decode", *, capacity: int = 4, layout: KvLayout = LAYOUT, **stats: object) -> Node:
    hello = Hello(
        protocol_min=1,
        protocol_max=1,
        role=role,
        node_id=node_id,
        incarnation=f"{node_id}-life",
        model=ModelCard("m", "w", "v", 100),
        layout=layout,
        transfer=TransferMetadata(node_id, b"", b""),
        capacity=capacity,
    )
    return Node(hello, 1, lambda frame: None, lambda reason: None, NodeStats(**stats))


def prompt(length: int, salt: int = 0) -> list[int]:
    return [salt * 100_000 + i for i in range(length)]


def test_without_nodes_or_with_draining_ones_there_is_no_choice():
    selector, p = Selector(), node("p", "prefill")
    assert selector.prefill([], [1]) is None
    assert selector.prefill([node("p", "prefill", draining=True)], [1]) is None
    assert selector.decode([], p) is None
    assert selector.decode([node("d", draining=True)], p) is None


def test_the_shorter_queue_wins_and_a_burst_is_spread():
    selector = Selector()
    nodes = [node("a", "prefill", queued=100), node("b", "prefill", queued=10)]
    assert selector.prefill(nodes, [1]) is nodes[1]
    nodes[1].assigned_tokens = 500
    assert selector.prefill(nodes, [1]) is nodes[0]


def test_a_remembered_prefix_outweighs_a_shorter_queue_up_to_its_length():
    selector = Selector()
    a, b = node("a", "prefill"), node("b", "prefill")
    assert selector.prefill([a], prompt(300)) is a
    a.stats = NodeStats(queued=250)
    assert selector.prefill([a, b], prompt(300)) is a  # 4 blocks of 64 remembered
    a.stats = NodeStats(queued=260)
    assert selector.prefill([a, b], prompt(300)) is b


def test_a_prefix_of_an_earlier_life_of_the_node_counts_nothing():
    selector = Selector()
    a, b = node("a", "prefill"), node("b", "prefill", queued=1)
    selector.prefill([a], prompt(300))
    a.hello = msgspec.structs.replace(a.hello, incarnation="later")
    a.stats = NodeStats(queued=2)
    assert selector.prefill([a, b], prompt(300)) is b


def test_a_block_counts_only_behind_the_same_prefix():
    selector = Selector()
    a, b = node("a", "prefill", queued=1), node("b", "prefill")
    selector.prefill([a], prompt(64, 1) + prompt(64, 2))
    assert selector.prefill([a, b], prompt(64, 3) + prompt(64, 2)) is b


def test_excluded_nodes_are_taken_only_when_nothing_else_is_left():
    selector, p = Selector(), node("p", "prefill")
    a, b = node("a"), node("b", active=4)
    for _ in range(20):
        assert selector.decode([a, b], p, exclude={"a"}) is b
    assert selector.decode([a], p, exclude={"a"}) is a
    assert selector.prefill([p], [1], exclude={"p"}) is p


def test_decode_needs_the_layout_of_prefill_and_is_never_one_that_is_full():
    selector, p = Selector(), node("p", "prefill")
    other = node("other", layout=msgspec.structs.replace(LAYOUT, dtype="bf16"))
    idle, busy = node("idle"), node("busy", active=3)
    assert selector.decode([other], p) is None
    assert selector.decode([other, idle, busy], p, full={"idle"}) is busy
    assert selector.decode([other, idle, busy], p, exclude={"busy"}, full={"idle"}) is busy
    assert selector.decode([other, idle, busy], p, full={"idle", "busy"}) is None


def test_what_fits_on_a_node_is_a_matter_of_slots_and_of_the_pages_that_it_has_told():
    request = Footprint(prompt_tokens=33, max_tokens=16, n=3)  # two shared pages and one or two for each choice
    assert node("untold", capacity=3).fits(request)
    assert not node("few slots", capacity=2).fits(request)
    assert node("exact", pages_free=3, pages_cached=1, pages_pinned=1).fits(request)
    assert not node("small", pages_free=4).fits(request)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 16, 17, 40])
def test_the_longest_output_takes_all_pages_and_one_more_token_would_take_too_many(length, n):
    longest = Footprint.longest_output(length, n, pages=50, page_size=16)
    assert Footprint(length, longest, n).pages(16) <= 50
    assert Footprint(length, longest + 1, n).pages(16) > 50


@pytest.mark.parametrize(
    ("busy", "idle"), [({"active": 3}, {"active": 1}), ({"active": 4, "queued": 9}, {"active": 4})]
)
def test_the_less_loaded_of_two_is_taken(busy, idle):
    selector, p = Selector(), node("p", "prefill")
    a, b = node("a", **busy), node("b", **idle)
    assert all(selector.decode([a, b], p) is b for _ in range(20))


def test_memory_of_prefixes_is_bounded(monkeypatch):
    monkeypatch.setattr("pdserve.master.selector._MAX_BLOCKS", 4)
    selector, a = Selector(), node("a", "prefill")
    for salt in range(10):
        selector.prefill([a], prompt(128, salt))
    assert len(selector._blocks) == 4
