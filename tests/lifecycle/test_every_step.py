"""Whatever fails at whatever step: one outcome for the client, all pools at zero, and the next request succeeds."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import attrs
import pytest

from lifecycle.steps import FAULTS, Run, play

CASES = [(fault, n, nodes) for fault in FAULTS for n in (1, 3) for nodes in (1, 2)]
SAMPLES = 8
"""Per case, in the default suite."""


@pytest.mark.parametrize(("n", "least"), [(1, 60), (3, 120)])
def test_a_run_without_a_fault_is_complete_and_replays_step_by_step(n, least):
    outcome, steps = play(Run(FAULTS[0], n, 1, seed=5, k=None))
    assert outcome == "complete"
    assert play(Run(FAULTS[0], n, 1, seed=5, k=None)) == (outcome, steps)
    assert steps >= least
    print(f"n = {n}: K = {steps} steps")


@pytest.mark.no_cover  # hundreds of whole services, twice as slow with it
@pytest.mark.parametrize(("fault", "n", "nodes"), CASES)
def test_a_fault_at_sampled_steps(fault, n, nodes):
    draw = random.Random(f"{fault} {n} {nodes}")
    last = play(Run(fault, n, nodes, seed=0, k=None))[1]
    for _ in range(SAMPLES):
        play(Run(fault, n, nodes, seed=draw.randrange(10**6), k=draw.randint(1, last)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fault", "n", "nodes"), CASES)
def test_a_fault_at_every_step(fault, n, nodes):
    case = Run(fault, n, nodes, seed=0, k=None)
    last = play(case)[1]
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        outcomes = Counter(workers.map(_outcome, [attrs.evolve(case, k=k) for k in range(1, last + 1)], chunksize=16))
    print(f"{fault}, n = {n}, {nodes} of each role: K = {last} steps, {dict(outcomes)}")
    assert outcomes.total() == last


def _outcome(run: Run) -> str:
    return play(run)[0]
