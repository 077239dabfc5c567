import pytest

from pdserve.engine.slots import SlotPool


def test_all_or_nothing_lowest_first():
    slots = SlotPool(3)
    assert slots.allocate(2) == (0, 1)
    assert slots.allocate(2) is None
    assert (slots.used, slots.free, slots.capacity) == (2, 1, 3)
    slots.release((0,))
    assert slots.allocate(2) == (0, 2)
    assert slots.allocate() is None
    assert slots.allocate(0) == ()
    slots.release((2, 0, 1))
    assert (slots.used, slots.free) == (0, 3)
    assert slots.allocate(3) == (0, 1, 2)


@pytest.mark.parametrize("wrong", [(1,), (0, 0), (0, 1), (7,), (-1,)])
def test_a_wrong_release_changes_nothing(wrong):
    slots = SlotPool(2)
    assert slots.allocate() == (0,)
    with pytest.raises(RuntimeError, match="not all in use"):
        slots.release(wrong)
    assert slots.used == 1
    assert 0 in slots
    assert 1 not in slots


def test_double_release_raises():
    slots = SlotPool(1)
    taken = slots.allocate()
    slots.release(taken)
    with pytest.raises(RuntimeError):
        slots.release(taken)


def test_unusable_numbers():
    with pytest.raises(ValueError, match="at least one slot"):
        SlotPool(0)
    with pytest.raises(ValueError, match="cannot allocate -1"):
        SlotPool(1).allocate(-1)
