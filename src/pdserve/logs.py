"""Logging of a process: lines for people, or one JSON object a line, on stderr.

Every line carries role and pid, so the processes of one `up` can share its stderr: a line is written in one call and
lines of several processes do not mix. A thread writes them, so that a stderr that nobody reads stops nothing else.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from io import UnsupportedOperation
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_QUIET = ("hypercorn.access", "hypercorn.error", "trio-websocket", "httpcore", "filelock")
_QUEUED = 10_000
_FLUSH = 1.0
"""Seconds that the end of a process waits for what is not written yet."""


def _timestamp(created: float) -> str:
    whole = time.gmtime(created)
    return time.strftime("%Y-%m-%dT%H:%M:%S", whole) + f".{int(created % 1 * 1000):03d}Z"


class TextFormatter(logging.Formatter):
    """`time level role[pid] logger: message`; a traceback follows on lines of its own."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._who = f"{role}[{os.getpid()}]"

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("pdserve.")
        line = (
            f"{_timestamp(record.created)} {record.levelname.lower():<7} {self._who} {name}: "
            f"{_one_line(record.getMessage())}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what a caller passes as `extra` becomes fields of its own."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role
        self._pid = os.getpid()

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": self._pid,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


def _one_line(message: str) -> str:
    """A message with line breaks could pass for further log lines."""
    return message.replace("\r", "\\r").replace("\n", "\\n")


class LogWriter(logging.Handler):
    """Formats a record where it is made and has a thread of its own write it: who logs never waits for a reader.

    At most `_QUEUED` lines wait. When there are more, records are dropped until all that wait are written, and then a
    line says how many.

    Closing a handler changes nothing: libraries that configure logging when they are imported, as NIXL does, close all
    handlers there are, and make `logging` forget to flush them at exit. So that is done here.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._writing = False
        self._ended = False
        self._changed = threading.Condition()
        atexit.register(self.flush)
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # as in every handler: whoever logs is not to fail
            self.handleError(record)
        else:
            self.put(line)

    def put(self, line: str) -> None:
        """Have `line` written as it is, after all before it."""
        with self._changed:
            if self._dropped or len(self._lines) >= _QUEUED:
                self._dropped += 1
            else:
                self._lines.append(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, for a second at most."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._lines or self._dropped or self._writing), _FLUSH)

    def end(self) -> None:
        """For one that is replaced: the thread ends when it has written what there is."""
        self.flush()
        atexit.unregister(self.flush)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _write_all(self) -> None:
        while (line := self._next()) is not None:
            with suppress(OSError, ValueError):  # the reader is gone, or the stream is closed: nobody is left to tell
                self._write(line + "\n")

    def _next(self) -> str | None:
        """Wait for the next line; None when there will be none."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._dropped or self._ended)
            if self._lines:
                line = self._lines.popleft()
            elif self._dropped:
                text = "%d log records were dropped here: they were not read in time"
                line = self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (self._dropped,), None))
                self._dropped = 0
            else:
                return None
            self._writing = True
            return line

    def _write(self, text: str) -> None:
        """Not through the buffer of the stream: a thread that hangs there holds a lock that the exit needs."""
        try:
            descriptor = self._stream.fileno()
        except UnsupportedOperation:  # a stream in memory
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode(self._stream.encoding, "backslashreplace")
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # another process has made a stderr that we share non-blocking
                select.select((), (descriptor,), ())


def setup_logging(
    role: str,
    *,
    level: str = "info",
    format: Literal["text", "json"] = "text",
    stream: TextIO | None = None,
) -> None:
    """Send all logging of this process to `stream` (stderr). Calling it again replaces the former set-up."""
    handler = LogWriter(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(role) if format == "json" else TextFormatter(role))
    root = logging.getLogger()
    for former in root.handlers:
        if isinstance(former, LogWriter):
            former.end()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("pdserve").setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.captureWarnings(True)


def say(logger: logging.Logger, message: str, *, json: bool) -> None:
    """Say what the process ends with: `pdserve: …` for people, a record where logs are JSON.

    `json`: whether they are to be JSON, in case they have not been set up.
    """
    writer = next((one for one in logging.getLogger().handlers if isinstance(one, LogWriter)), None)
    if writer is not None:
        json = isinstance(writer.formatter, JsonFormatter)
    elif json:
        setup_logging("pdserve", format="json")
    if json:
        logger.critical("%s", message)
    elif writer is not None:
        writer.put(f"pdserve: {message}")
    else:
        print(f"pdserve: {message}", file=sys.stderr, flush=True)
