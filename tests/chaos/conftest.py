"""Options of the chaos tests: `nox -s chaos -- --rounds 1 --seed 7`."""

from __future__ import annotations

import os
import random

import pytest


def pytest_addoption(parser):
    parser.addoption("--rounds", type=int, default=10, help="how often each event strikes each role (default: 10)")
    parser.addoption("--seed", default="", help="of a run that is to be repeated (default: drawn)")


@pytest.fixture
def rounds(request) -> int:
    return request.config.getoption("--rounds", default=10)


@pytest.fixture
def seed(request) -> str:
    return request.config.getoption("--seed", default="") or str(random.randrange(10**6))


@pytest.fixture
def environment() -> dict[str, str]:
    """Without what would change the service."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "UCX_"))}
