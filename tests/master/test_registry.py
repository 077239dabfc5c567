"""Registrations: owned by the context that made them; replaced and lost ones wake their requests at once."""

from __future__ import annotations

import attrs
import msgspec
import pytest

from pdserve.master.registry import Registry
from pdserve.wire.messages import Hello, KvLayout, ModelCard, PeerDown, PeerUp, TransferMetadata

LAYOUT = KvLayout(16, 128, 1, 1, 1, "sim")


def hello(node_id: str, role: str = "decode", incarnation: str = "i", layout: KvLayout = LAYOUT) -> Hello:
    return Hello(
        protocol_min=1,
        protocol_max=1,
        role=role,
        node_id=node_id,
        incarnation=incarnation,
        model=ModelCard("m", "w", "v", 100),
        layout=layout,
        transfer=TransferMetadata(f"{node_id}-{incarnation}", b"", b""),
        capacity=4,
    )


@attrs.define
class Link:
    sent: list[object] = attrs.field(factory=list)
    closed: list[str] = attrs.field(factory=list)

    def join(self, registry: Registry, said: Hello):
        return registry.registered(said, self.sent.append, self.closed.append)


@attrs.define
class Box:
    losses: list[tuple[object, str]] = attrs.field(factory=list)

    def deliver(self, node, frame) -> None:
        raise AssertionError

    def lost(self, node, reason) -> None:
        self.losses.append((node, reason))


def test_a_registration_lasts_as_long_as_its_context():
    registry = Registry()
    with Link().join(registry, hello("d0")) as node:
        assert registry.nodes() == [node]
        assert registry.nodes("decode") == [node]
        assert registry.nodes("prefill") == []
        assert registry.is_current(node)
    assert registry.nodes() == []
    assert not registry.is_current(node)


def test_a_lost_node_wakes_all_its_requests_once():
    registry, box = Registry(), Box()
    with pytest.raises(RuntimeError), Link().join(registry, hello("d0")) as node:
        node.mailboxes["r", 1] = node.mailboxes["s", 1] = box
        raise RuntimeError
    assert box.losses == [(node, "lost"), (node, "lost")]
    assert node.mailboxes == {}


@pytest.mark.failure(27)
def test_a_newer_registration_replaces_the_older_whose_end_then_changes_nothing():
    registry, old_link, box = Registry(), Link(), Box()
    old_context = old_link.join(registry, hello("d0", incarnation="a"))
    old = old_context.__enter__()
    old.mailboxes["r", 1] = box
    with Link().join(registry, hello("d0", incarnation="b")) as new:
        assert old_link.closed == ["replaced by a newer registration"]
        assert box.losses == [(old, "replaced by a newer registration")]
        assert new.generation > old.generation
        old_context.__exit__(None, None, None)
        assert registry.nodes() == [new]
        assert len(box.losses) == 1
    assert registry.nodes() == []


def test_peers_of_the_other_role_and_the_same_layout_are_introduced_and_taken_leave_of():
    registry, p, d, other = Registry(), Link(), Link(), Link()
    with p.join(registry, hello("p0", "prefill")) as prefill:
        registry.introduce(prefill)
        with other.join(registry, hello("d1", layout=msgspec.structs.replace(LAYOUT, page_size=32))) as unmatched:
            registry.introduce(unmatched)
            with d.join(registry, hello("d0")) as decode:
                registry.introduce(decode)
                assert [(type(f), f.node_id) for f in p.sent] == [(PeerUp, "d0")]
                assert [(type(f), f.node_id) for f in d.sent] == [(PeerUp, "p0")]
            assert p.sent[-1] == PeerDown("d0", "i")
    assert other.sent == []


def test_a_refusal_is_forgotten_when_the_node_registers():
    registry = Registry()
    registry.absent.note("d0", "refused decode d0: why", 10.0)
    assert registry.absent.reasons(12.0) == ["refused decode d0: why (2 s ago)"]
    with Link().join(registry, hello("d0")):
        assert registry.absent.reasons(12.0) == []
