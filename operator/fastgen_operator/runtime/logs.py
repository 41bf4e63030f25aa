"""Logging as text or JSON lines."""

from __future__ import annotations

import logging
import sys
from typing import Literal

from fastgen.logs import JSONFormatter


def configure_logging(log_format: Literal["json", "text"], *, verbose: bool) -> None:
    """Log to standard error; from kopf only warnings, unless verbose."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONFormatter() if log_format == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("fastgen_operator").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("kopf").setLevel(logging.DEBUG if verbose else logging.WARNING)
    # Serves only the health probe; the cause of a failed probe is logged elsewhere.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
