"""Logging as text or JSON lines."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message and, for exceptions, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a newline."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(log_format: Literal["json", "text"], *, verbose: bool) -> None:
    """Log to standard error; from kopf only warnings, unless verbose."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("fastgen_operator").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("kopf").setLevel(logging.DEBUG if verbose else logging.WARNING)
    # Serves only the health probe; the cause of a failed probe is logged elsewhere.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
