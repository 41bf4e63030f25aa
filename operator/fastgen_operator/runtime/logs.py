"""Log lines for people or for programs."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message and, where there is one, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
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
    """Sends the operator's lines to standard error; kopf's only where something is wrong, unless verbose."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("fastgen_operator").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("kopf").setLevel(logging.DEBUG if verbose else logging.WARNING)
    # Serves the health probe only: what a failed probe means has been said by then, in one line.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
