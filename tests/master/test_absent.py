"""What is remembered of nodes that are not here: the newest reason, bounded in number and time."""

from __future__ import annotations

from pdserve.master.absent import Absences


def test_the_newest_reason_of_each_node_is_told_for_ten_minutes():
    absent = Absences()
    absent.note("d0", "refused d0", 0.0)
    absent.note("d1", "lost d1", 5.0)
    absent.note("d0", "lost d0", 10.0)
    assert absent.reasons(12.0) == ["lost d1 (7 s ago)", "lost d0 (2 s ago)"]
    assert absent.reasons(606.0) == ["lost d0 (596 s ago)"]
    absent.forget("d0")
    absent.forget("d0")
    assert absent.reasons(12.0) == ["lost d1 (7 s ago)"]


def test_the_number_of_remembered_nodes_is_bounded():
    absent = Absences()
    for i in range(1000):
        absent.note(f"d{i}", f"lost d{i}", float(i) / 1000)
    reasons = absent.reasons(1.0)
    assert len(reasons) == 64
    assert reasons[-1].startswith("lost d999")
