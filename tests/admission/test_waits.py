from __future__ import annotations

import pytest

from pdserve.admission.waits import MeasuredWaits


def test_a_refused_client_is_told_the_recent_waits_and_at_least_a_second():
    waits = MeasuredWaits()
    assert waits.retry_after == 1.0
    for _ in range(50):
        waits.add(4.0)
    assert waits.retry_after == pytest.approx(4.0, rel=0.01)
    for _ in range(50):
        waits.add(0.0)
    assert waits.retry_after == 1.0
