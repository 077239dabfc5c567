"""The parts of the benches that decide what is measured, in virtual time. The figures themselves: `nox -s bench`."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import trio

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of scripts/bench."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")
    return import_module


@pytest.mark.trio
async def test_without_any_cost_of_computing_pool_and_coordinator_reach_the_limit(bench, autojump_clock):
    admission, stand_ins = bench("admission"), bench("stand_ins")
    with trio.fail_after(30):
        async with stand_ins.open_stand_ins(slots=64, queue=192, busy=0.05) as (coordinator, decode):
            tally = await admission.saturate(coordinator, max_tokens=2, warm_up=0.125, seconds=0.5)
    assert tally.per_second == pytest.approx(64 / 0.05, rel=0.001)
    assert (tally.refused, decode.pool.peak) == (0, 64)


@pytest.mark.trio
async def test_a_queue_that_is_one_too_short_refuses_one_client(bench, autojump_clock):
    admission, stand_ins = bench("admission"), bench("stand_ins")
    with trio.fail_after(30):
        async with stand_ins.open_stand_ins(slots=64, queue=191, busy=0.05) as (coordinator, _):
            tally = await admission.saturate(coordinator, max_tokens=2, warm_up=0.125, seconds=0.25)
    assert tally.refused == 1


def test_a_pool_that_grants_a_slot_too_many_is_noticed(bench):
    pool = bench("watched_pool").WatchedPool(2, 2)
    first, _, third, _ = [pool.request() for _ in range(4)]
    pool.close(first)
    pool.close(third)
    assert (pool.held, pool.peak) == (2, 2)
    pool._free += 1
    with pytest.raises(AssertionError, match="3 slots of 2 are held"):
        pool.request()


def test_an_unknown_bench_is_refused_with_the_names_of_the_known_ones():
    words = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", "bench", "--", "nothing"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "admission" in ended.stderr
