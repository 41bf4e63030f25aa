"""Render the dashboards to the chart's files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.deployment import build_dashboard

FOLDER: Final = Path(__file__).parents[1] / "fastgen" / "dashboards"


def rendered() -> dict[str, str]:
    """Return the text of each file by its name."""
    encode = JSONEncoder(sort_keys=True, indent=2).encode
    return {"fastgen-deployment.json": encode(build_dashboard().build()) + "\n"}
