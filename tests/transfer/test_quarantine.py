from __future__ import annotations

import pytest

from pdserve.transfer.quarantine import Quarantine


def test_pages_come_back_exactly_once():
    quarantine = Quarantine()
    quarantine.add(1, [3, 4], now=10.0)
    quarantine.add(2, [5], now=12.0)
    assert quarantine.count == 3
    assert quarantine.oldest_age(15.0) == 5.0
    assert quarantine.terminal(1) == (3, 4)
    assert quarantine.terminal(1) == ()
    assert quarantine.terminal(9) == ()
    assert (quarantine.count, quarantine.oldest_age(15.0)) == (1, 3.0)
    assert quarantine.terminal(2) == (5,)
    assert (quarantine.count, quarantine.oldest_age(99.0)) == (0, 0.0)


def test_twice_the_same_transfer_is_a_bug():
    quarantine = Quarantine()
    quarantine.add(1, [3], now=0.0)
    with pytest.raises(RuntimeError):
        quarantine.add(1, [3], now=0.0)


def test_a_transfer_that_does_not_end_for_a_minute_is_over_the_limit():
    quarantine = Quarantine()
    assert quarantine.over_limit(100, 1e9) is None
    quarantine.add(1, [3], now=10.0)
    assert quarantine.over_limit(100, 70.0) is None
    assert "60 s" in quarantine.over_limit(100, 70.1)
    quarantine.terminal(1)
    assert quarantine.over_limit(100, 1e9) is None


def test_a_quarter_of_the_pool_is_over_the_limit_unless_it_has_just_come():
    quarantine = Quarantine()
    quarantine.add(1, range(20), now=0.0)
    assert quarantine.over_limit(100, 59.0) is None
    quarantine.add(2, range(20, 30), now=50.0)
    assert quarantine.over_limit(100, 54.0) is None
    assert "30 of 100" in quarantine.over_limit(100, 55.1)
