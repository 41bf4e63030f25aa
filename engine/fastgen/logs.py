"""Logging as text or JSON. The server and the engine process both log to standard error.

A line has a message and optional fields: `request id=... status=200` as text, separate members as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar

FORMATS = ("text", "json")

# Id of the HTTP request that the current task handles. It is added to every line that the task logs.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def log_event(log: logging.Logger, message: str, **fields: object) -> None:
    """Log `message` at level info with those `fields` that are not None."""
    log.info(message, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


def configure(log_format: str) -> None:
    """Log from level info to standard error, in one of `FORMATS`. Replaces handlers set before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def current_format() -> str:
    """Return the format that `configure` has set, for a child process."""
    return "json" if any(isinstance(each.formatter, JSONFormatter) for each in logging.root.handlers) else "text"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    current = request_id.get()
    if current is not None:
        fields["request_id"] = current
    return fields


class TextFormatter(logging.Formatter):
    """Formats a record as time, level, message and fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        """Return the line without a traceback."""
        line = super().formatMessage(record)
        return " ".join((line, *(f"{name}={_text(value)}" for name, value in _fields(record).items())))


class JSONFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message, fields and any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object."""
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
