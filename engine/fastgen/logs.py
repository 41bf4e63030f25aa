"""Log lines for people or for programs. Both processes of an engine write theirs to standard error.

A line is a message and, where there is something to say about it, fields: `request id=... status=200` as text, members
of their own as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar

FORMATS = ("text", "json")

# The HTTP request that a task works on: it goes on every line that is logged meanwhile.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def say(log: logging.Logger, message: str, **fields: object) -> None:
    """Logs `message` with `fields` at level info; those that are None are left out."""
    log.info(message, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


def configure(log_format: str) -> None:
    """Sends this process's lines to standard error in one of `FORMATS`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    current = request_id.get()
    if current is not None:
        fields["request_id"] = current
    return fields


class TextFormatter(logging.Formatter):
    """Time, level, message and fields, as a line to read."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        """The line, without a traceback."""
        line = super().formatMessage(record)
        return " ".join((line, *(f"{name}={_text(value)}" for name, value in _fields(record).items())))


class JSONFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, fields and, where there is one, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
