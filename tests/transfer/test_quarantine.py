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


def test_limit_needs_both_many_pages_and_a_long_time():
    quarantine = Quarantine()
    assert quarantine.over_limit(100, 1e9) is None
    quarantine.add(1, range(20), now=0.0)
    assert quarantine.over_limit(100, 1e9) is None
    quarantine.add(2, range(20, 30), now=50.0)
    assert quarantine.over_limit(100, 60.0) is None
    assert quarantine.over_limit(100, 100.0) is None  # only 20 pages are old
    message = quarantine.over_limit(100, 111.0)
    assert message is not None
    assert "30 of 100" in message
    assert quarantine.over_limit(100, 111.0, share=0.5) is None
    assert quarantine.over_limit(100, 111.0, seconds=200.0) is None
