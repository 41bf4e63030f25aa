"""docs/monitoring.md lists exactly the existing metrics with their help texts."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from fastgen.server.serving.metrics import Metrics as EngineMetrics
from fastgen_operator.metrics import Metrics as OperatorMetrics
from gateway.stand_ins import gateway_registry

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"
ENDINGS = {"counter": "_total", "info": "_info"}


def described(registry: CollectorRegistry) -> set[tuple[str, str, str]]:
    """Return name (as in queries), type and help text of each metric."""
    return {
        (f"{family.name}{ENDINGS.get(family.type, '')}", family.type, family.documentation)
        for family in registry.collect()
    }


def test_the_page_lists_exactly_the_existing_metrics() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `fastgen_")]
    on_page = {(name.strip(" `"), kind.strip(), words.strip()) for name, kind, _, words in rows}
    registries = (EngineMetrics("model").registry, OperatorMetrics().registry, gateway_registry())
    assert on_page == set[tuple[str, str, str]]().union(*map(described, registries))
