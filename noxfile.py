"""Checks by name: `python -m nox -s lint`. They run in the environment that nox itself runs in (see scripts/test)."""

from __future__ import annotations

import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "imports", "tests", "e2e"]

BENCHES = {"admission": "scripts/bench/admission.py"}


def python(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and common mistakes."""
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict mypy."""
    python(session, "-m", "mypy")


@nox.session
def imports(session: nox.Session) -> None:
    """Imports go one way only."""
    session.run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that needs no processes."""
    python(session, "-m", "pytest", "-m", "not e2e and not exhaustive and not chaos and not soak", *session.posargs)


@nox.session
def e2e(session: nox.Session) -> None:
    """Real processes, real NIXL, real HTTP."""
    python(session, "-m", "pytest", "-m", "e2e", *session.posargs)


@nox.session
def exhaustive(session: nox.Session) -> None:
    """A fault at every single step of a request, and hundreds of storms, in virtual time: up to an hour of CPU."""
    python(session, "-m", "pytest", "-m", "exhaustive", "-s", "tests/lifecycle", *session.posargs)


@nox.session
def chaos(session: nox.Session) -> None:
    """Signals, stops and closed sockets under load, up to half an hour. `-- --rounds 1 --seed 7`: shorter, repeated."""
    python(session, "-m", "pytest", "-m", "chaos", "-s", "tests/chaos", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Whether anything grows under a mixed load in ten minutes. `-- --minutes 60`: in an hour."""
    python(session, "-m", "pytest", "-m", "soak", "-s", "tests/soak", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Figures, by name: `nox -s bench -- admission`. What they mean: docs/performance.md."""
    if len(session.posargs) != 1 or session.posargs[0] not in BENCHES:
        session.error(f"name one bench after `--`: {', '.join(BENCHES)}")
    python(session, BENCHES[session.posargs[0]])
