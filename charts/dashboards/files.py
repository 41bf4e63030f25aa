"""Render the dashboards to the chart's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.autoscaling import build_autoscaling
from dashboards.deployment import build_deployment
from dashboards.fleet import build_fleet
from dashboards.gateway import build_gateway
from dashboards.model_cache import build_model_cache
from dashboards.operator import build_operator

FOLDER: Final = Path(__file__).parents[1] / "fastgen" / "dashboards"
_BUILDERS: Final[tuple[Callable[[], Dashboard], ...]] = (
    build_fleet,
    build_deployment,
    build_autoscaling,
    build_operator,
    build_model_cache,
    build_gateway,
)

# Metrics that no panel shows, and why.
NOT_SHOWN: Final = {
    "fastgen_cache_config_info": "Constants of the KV cache for the endpoint pickers of gateways.",
}


def rendered() -> dict[str, str]:
    """Return the text of each file by its name."""
    encode = JSONEncoder(sort_keys=True, indent=2).encode
    built = [builder().build() for builder in _BUILDERS]
    return {f"{dashboard.uid}.json": encode(dashboard) + "\n" for dashboard in built}
