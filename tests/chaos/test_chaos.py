"""Signals, stops and closed sockets on every role of a real service under load, and what its clients see of it."""

from __future__ import annotations

import pytest

from chaos.fleet import open_fleet
from chaos.load import Load, ModelAsks, SimAsks
from chaos.scenario import Course, Scenario

pytestmark = pytest.mark.chaos

HEARTBEAT = 0.5
PATIENCE = 3 * HEARTBEAT
"""Seconds after which a silent peer is lost."""
REQUEST_TIMEOUT = 60.0
DEADLINE = REQUEST_TIMEOUT + 10
"""A Master that is stopped for a while cannot answer in time, and a busy machine is late."""
COMMON = (
    f"--heartbeat-interval={HEARTBEAT:g}",
    "--admission-timeout=5",
    f"--request-timeout={REQUEST_TIMEOUT:g}",
    "--drain-timeout=3",
)
UP = ("--transfer-timeout=5", "--confirm-timeout=3", "--restart-intensity=1000")
SCARCE_SLOTS = ("--max-running-requests=6", "--admission-queue-size=64", "--sim-decode-ms=40")
"""The load wants more slots than there are: throughput is what the slots give, whatever else the machine does, and one
that is lost would be missed."""


@pytest.mark.trio
@pytest.mark.parametrize("transport", [{}, {"UCX_TLS": "tcp,self"}], ids=["default", "tcp"])
async def test_every_loss_of_every_role_under_load(transport, rounds, seed, environment, tmp_path):
    master_flags = ("--model=sim-bytes", *COMMON)
    up_flags = ("--engine", "sim", *UP, *SCARCE_SLOTS)
    async with open_fleet(tmp_path, master_flags=master_flags, up_flags=up_flags, env=environment | transport) as fleet:
        fronts = list(fleet.seats.values())
        load = Load(fronts, SimAsks(seed), clients=12, deadline=DEADLINE, leave_within=1.5, seed=seed)
        course = Course(seed, rounds, gap=2.5, window=4.0, settle=3.0, patience=PATIENCE)
        await Scenario(course, fleet, load).run()


@pytest.mark.trio
async def test_every_loss_of_every_role_with_a_model(seed, environment, tmp_path):
    """Its output is that of the reference, whatever happens around it."""
    up_flags = (*UP, "--dtype=float32", "--kv-tokens=8192", "--max-running-requests=4", "--admission-queue-size=64")
    async with open_fleet(tmp_path, master_flags=COMMON, up_flags=up_flags, env=environment) as fleet:
        fronts = list(fleet.seats.values())
        load = Load(fronts, ModelAsks(), clients=5, deadline=DEADLINE, leave_within=3.0, seed=seed)
        course = Course(seed, 1, gap=6.0, window=8.0, settle=6.0, patience=PATIENCE, all_cpus=True)
        await Scenario(course, fleet, load).run()
