"""Services for the end-to-end tests."""

from __future__ import annotations

from functools import partial

import pytest

from e2e.service import Service, alive, free_ports, running_logs, wait_until


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for path in running_logs:
            report.sections.append((f"log of the service ({path.name})", path.read_text()[-12_000:]))


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    """The embedded model, shared by the tests that leave it as they found it."""
    log = tmp_path_factory.mktemp("service") / "model.log"
    with Service(log, "--kv-tokens", "8192", "--dtype", "float32") as it:
        yield it


@pytest.fixture(scope="session")
def make_sim():
    """Makes a service without a model, which starts in a few seconds: `make_sim(log, *flags)`."""
    return lambda log, *flags: Service(log, "--engine", "sim", *flags)


@pytest.fixture
def sim(tmp_path, make_sim):
    """Makes a service of its own, without a model."""
    return partial(make_sim, tmp_path / "sim.log")


@pytest.fixture(scope="session")
def await_true():
    return wait_until


@pytest.fixture(scope="session", name="free_ports")
def free_ports_fixture():
    return free_ports


@pytest.fixture(scope="session")
def is_alive():
    return alive
