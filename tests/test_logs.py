"""Logging over a real pipe that nobody reads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

import pytest

from pdserve import logs

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("pdserve.test")
MANY = 20_000
"""More records than wait in a queue."""


@pytest.fixture(autouse=True)
def same_logging_afterwards() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("pdserve")
    handlers, levels = root.handlers[:], (root.level, own.level)
    yield
    for handler in root.handlers:
        if isinstance(handler, logs.LogWriter) and handler not in handlers:
            handler.end()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])
    logging.captureWarnings(False)


@pytest.fixture
def full() -> Iterator[tuple[TextIO, TextIO]]:
    """Both ends of a pipe that takes no more bytes: the end to read, the end to write."""
    reader, writer = os.pipe()
    fill(writer)
    with os.fdopen(reader) as out, os.fdopen(writer, "w") as into:
        yield out, into


def fill(writer: int) -> None:
    os.set_blocking(writer, False)
    for size in (4096, 1):
        try:
            while True:
                os.write(writer, b"\n" * size)
        except BlockingIOError:
            pass
    os.set_blocking(writer, True)


def log_many() -> None:
    for number in range(MANY):
        log.info("record %d", number)


@pytest.mark.parametrize("blocking", [True, False])
def test_nobody_waits_for_a_reader_and_what_is_dropped_is_counted(full: tuple[TextIO, TextIO], blocking: bool) -> None:
    out, into = full
    os.set_blocking(into.fileno(), blocking)
    logs.setup_logging("master", stream=into)
    work = threading.Thread(target=log_many, daemon=True)
    work.start()
    work.join(10)
    assert not work.is_alive()
    lines: list[str] = []
    while not lines or "dropped" not in lines[-1]:
        if line := out.readline().strip():
            lines.append(line)
    log.info("it flows again")
    lines.append(out.readline().strip())
    kept = lines[:-2]
    assert [line.split()[-1] for line in kept] == [str(number) for number in range(len(kept))]
    assert f" {MANY - len(kept)} log records were dropped" in lines[-2]
    assert "warning master[" in lines[-2]
    assert lines[-1].endswith("it flows again")


def test_a_flush_is_bounded(full: tuple[TextIO, TextIO]) -> None:
    logs.setup_logging("master", stream=full[1])
    log.info("never read")
    began = time.monotonic()
    logging.getLogger().handlers[0].flush()
    assert 0.5 < time.monotonic() - began < 5


def test_a_stream_that_is_gone_hurts_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as into:
        logs.setup_logging("master", stream=into)
        log.info("nobody is there")
        logging.getLogger().handlers[0].flush()


PROGRAM = """
import logging, sys, trio
from types import SimpleNamespace
from pdserve import cli, logs
from pdserve.errors import FatalError
logs.setup_logging("master", format=sys.argv[1])
async def fail():
    for number in range(3000):
        logging.getLogger("pdserve.test").info("record %d", number)
    raise FatalError("hung")
cli.app = SimpleNamespace(meta=lambda *_, **__: trio.run(fail))
cli.main()
"""


def test_an_error_exit_with_nobody_to_read_takes_a_second(full: tuple[TextIO, TextIO]) -> None:
    began = time.monotonic()
    assert subprocess.call([sys.executable, "-c", PROGRAM, "text"], stderr=full[1], timeout=30) == 70
    print(f"{time.monotonic() - began:.2f} s")


@pytest.mark.parametrize(
    ("form", "last"), [("text", "pdserve: hung\n"), ("json", '"logger": "pdserve.cli", "message": "hung"}\n')]
)
def test_the_last_lines_of_an_error_exit_are_written(form: str, last: str) -> None:
    it = subprocess.run([sys.executable, "-c", PROGRAM, form], stderr=subprocess.PIPE, text=True, timeout=30)
    assert it.returncode == 70
    lines = it.stderr.splitlines(keepends=True)
    assert len(lines) == 3001
    assert "record 2999" in lines[-2]
    assert lines[-1].endswith(last)


def test_a_library_that_configures_logging_when_it_is_imported_takes_no_line_away() -> None:
    program = (
        "import logging, logging.config\n"
        "from pdserve.logs import setup_logging\n"
        "setup_logging('test')\n"
        "logging.getLogger('pdserve').info('before')\n"
        "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': False})\n"
        "logging.getLogger('pdserve').info('after')\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert [line.rpartition(" ")[2] for line in found.stderr.splitlines()] == ["before", "after"]
