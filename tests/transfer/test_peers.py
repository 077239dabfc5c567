"""When peers are admitted and removed, as a pure state machine."""

from __future__ import annotations

import pytest

from pdserve.transfer.peers import Add, PeerTable, Remove


def perform(table):
    """Do what the table asks for, successfully, until it asks for nothing."""
    done = []
    while actions := table.actions():
        for action in actions:
            done.append(action)
            (table.added if isinstance(action, Add) else table.removed)(action.agent)
    return done


@pytest.fixture
def table():
    table = PeerTable()
    table.seen("p-1", "A", node_id="p", blob=b"one")
    assert perform(table) == [Add("p-1", b"one")]
    return table


def test_reported_by_two_links_removed_with_the_second(table):
    table.seen("p-1", "B", node_id="p", blob=b"one")
    table.gone("p-1", "A")
    table.gone("p-1", "A")
    table.gone("unknown", "A")
    assert perform(table) == []
    assert (len(table), table.usable("p-1")) == (1, True)
    table.link_lost("B")
    assert perform(table) == [Remove("p-1")]
    assert not table.known("p-1")
    assert len(table) == 0


def test_removal_waits_for_what_is_in_flight(table):
    table.begin("p-1")
    table.begin("p-1")
    table.link_lost("A")
    table.end("p-1")
    assert perform(table) == []
    table.end("p-1")
    assert perform(table) == [Remove("p-1")]


def test_newer_incarnation_replaces_the_older(table):
    table.seen("p-2", "A", node_id="p", blob=b"two")
    assert perform(table) == [Remove("p-1"), Add("p-2", b"two")]
    assert not table.known("p-1")
    assert table.known("p-2")


def test_newer_incarnation_by_another_link_and_a_stale_report(table):
    table.begin("p-1")
    table.seen("p-2", "B", node_id="p", blob=b"two")
    assert perform(table) == [Add("p-2", b"two")]
    table.end("p-1")
    assert perform(table) == [Remove("p-1")]
    assert table.known("p-1")  # link A still says so, and may be right
    table.want("p-1")
    assert perform(table) == [Add("p-1", b"one")]
    table.node_gone("p", "1", "A")
    assert perform(table) == [Remove("p-1")]
    assert table.usable("p-2")


def test_disconnected_is_removed_once_and_comes_back_on_demand_or_report(table):
    table.begin("p-1")
    assert table.disconnected("p-1") is True
    assert table.disconnected("p-1") is False
    assert not table.usable("p-1")
    assert perform(table) == []
    table.end("p-1")
    assert perform(table) == [Remove("p-1")]
    assert table.disconnected("p-1") is False
    table.want("p-1")
    assert perform(table) == [Add("p-1", b"one")]
    table.disconnected("p-1")
    table.seen("p-1", "B", node_id="p", blob=b"one")  # reported before it could be removed
    assert perform(table) == [Remove("p-1"), Add("p-1", b"one")]
    table.want("unknown")


def test_refused_peer_is_not_tried_for_ever():
    table = PeerTable()
    table.seen("p-1", "A", node_id="p", blob=b"one")
    assert table.actions() == [Add("p-1", b"one")]
    assert table.actions() == []
    table.link_lost("A")
    table.seen("p-1", "A", node_id="p", blob=b"one")
    table.add_failed("p-1")
    assert table.actions() == []
    table.seen("p-1", "A", node_id="p", blob=b"better")
    assert perform(table) == [Add("p-1", b"better")]


def test_link_lost_while_the_peer_is_being_added():
    table = PeerTable()
    table.seen("p-1", "A", node_id="p", blob=b"one")
    table.actions()
    table.link_lost("A")
    table.added("p-1")
    assert perform(table) == [Remove("p-1")]
    assert not table.known("p-1")


def test_end_without_begin_is_a_bug(table):
    with pytest.raises(RuntimeError):
        table.end("p-1")
