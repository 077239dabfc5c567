"""Several faults at once under many requests: one honest outcome for each, and nothing is left in use."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from lifecycle.storm import play

SAMPLES = 8
ALL = 500


@pytest.mark.no_cover  # whole services, twice as slow with it
@pytest.mark.parametrize("seed", range(SAMPLES))
def test_a_storm_leaves_nothing_behind(seed):
    assert play(seed)["complete"] > 0


def test_a_storm_replays():
    assert play(0) == play(0)


@pytest.mark.exhaustive
def test_many_storms():
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        outcomes = sum(workers.map(play, range(SAMPLES, ALL), chunksize=4), Counter())
    print(f"{ALL - SAMPLES} storms: {dict(outcomes)}")
    assert outcomes["complete"] > outcomes.total() / 4
