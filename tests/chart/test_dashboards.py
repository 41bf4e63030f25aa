"""The chart's dashboards are up to date and query existing metrics."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from dashboards.files import FOLDER, rendered
from fastgen.server.serving.metrics import Metrics as EngineMetrics
from fastgen_operator.metrics import Metrics as OperatorMetrics
from harness.chart import SYSTEM, Helm


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def sample_names(registry: CollectorRegistry | Collector) -> set[str]:
    """Return the sample names, as queries use them."""
    names = set()
    for family in registry.collect():
        names.add(family.name)
        names |= {f"{family.name}_{end}" for end in ("total", "bucket", "count", "sum", "info")}
    return names


def test_the_committed_dashboards_are_up_to_date() -> None:
    held = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert held == rendered(), "run: cd charts && python -m dashboards"


def test_every_query_uses_existing_metrics_of_one_deployment() -> None:
    known = sample_names(EngineMetrics("model").registry) | sample_names(OperatorMetrics().registry)
    for text in rendered().values():
        for panel in panels(json.loads(text)):
            for target in panel["targets"]:
                names = re.findall(r"\bfastgen_[a-z_]+\b(?=\{)", target["expr"])
                assert names, panel["title"]
                assert set(names) <= known, panel["title"]
                assert target["expr"].count("{") == target["expr"].count('namespace="$namespace"'), panel["title"]


def test_every_panel_has_a_title_a_description_and_its_own_position() -> None:
    for text in rendered().values():
        places = set()
        for panel in panels(json.loads(text)):
            assert panel["title"]
            assert panel["description"].endswith("."), panel["title"]
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            places.add((place["x"], place["y"]))
            letters = [target["refId"] for target in panel["targets"]]
            assert len(set(letters)) == len(letters)
        assert len(places) == len(panels(json.loads(text)))


def config_map(helm: Helm, *args: str) -> dict[str, Any]:
    return helm.one("ConfigMap", *args)


def test_the_dashboards_have_the_label_of_grafanas_sidecar(helm: Helm) -> None:
    found = config_map(helm)
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["namespace"] == SYSTEM
    assert found["data"] == rendered()


def test_labels_annotations_and_namespace_of_the_dashboards_are_configurable(helm: Helm) -> None:
    values = {"namespace": "grafana", "labels": {"mine": "yes"}, "annotations": {"folder": "Models"}}
    found = config_map(helm, "--set-json", f"dashboards={json.dumps(values)}")["metadata"]
    assert (found["namespace"], found["labels"]["mine"], found["annotations"]) == (
        "grafana",
        "yes",
        {"folder": "Models"},
    )


def test_the_dashboards_are_optional(helm: Helm) -> None:
    text = yaml.safe_dump_all(helm.render("--set", "dashboards.enabled=false"))
    assert "kind: ConfigMap" not in text
