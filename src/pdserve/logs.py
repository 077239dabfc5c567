"""Logging of a process: lines for people, or one JSON object a line, on stderr.

Every line carries role and pid, so the processes of one `up` can share its stderr: a line is written in one call and
lines of several processes do not mix.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_QUIET = ("hypercorn.access", "hypercorn.error", "trio-websocket", "httpcore", "filelock")


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


def setup_logging(
    role: str,
    *,
    level: str = "info",
    format: Literal["text", "json"] = "text",
    stream: TextIO | None = None,
) -> None:
    """Send all logging of this process to `stream` (stderr). Calling it again replaces the former set-up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(role) if format == "json" else TextFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("pdserve").setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.captureWarnings(True)
