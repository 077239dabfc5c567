"""The option of the soak test: `nox -s soak -- --minutes 60`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, default=10, help="how long the soak takes (default: 10)")


@pytest.fixture
def minutes(request) -> float:
    return request.config.getoption("--minutes", default=10)
