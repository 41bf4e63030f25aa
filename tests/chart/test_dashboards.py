"""The chart's dashboards are up to date, query existing metrics, and show all of them."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from chart_files.files import ROOT
from cluster.commands import run
from dashboards.files import FOLDER, NOT_SHOWN, rendered
from dashboards.picture import Series, Span, draw, shown
from dashboards.queries import Query, event_queries, fill, panel_queries, variable_queries
from fastgen.server.serving.metrics import Metrics as EngineMetrics
from fastgen_operator.metrics import Metrics as OperatorMetrics
from gateway.stand_ins import gateway_registry
from harness.chart import SYSTEM, Helm
from harness.prometheus import ensure_promtool
from support.manifests import dump_all

NAMES = {"fleet", "deployment", "autoscaling", "operator", "model-cache", "gateway"}
DASHBOARDS: list[dict[str, Any]] = [json.loads(text) for text in rendered().values()]
# Labels that choose one FastGenDeployment, or some; of engines or of the operator.
CHOICES = (
    'namespace="$namespace",fastgen_dev_deployment="$deployment"',
    'namespace="$namespace",fastgen_dev_deployment=~"$deployment(_canary)?"',
    'namespace="$namespace",name="$deployment"',
    'namespace=~"$namespace"',
    'pod=~"$pod"',
)


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[Query]:
    return [query for panel in panels(dashboard) for query in panel_queries(panel)]


def families(*registries: CollectorRegistry | Collector) -> dict[str, set[str]]:
    """Return the sample names of each metric, as queries use them, by its name on the page of metrics."""
    endings = {"counter": "_total", "info": "_info"}
    return {
        family.name + endings.get(family.type, ""): {
            family.name + end for end in ("", "_total", "_bucket", "_count", "_sum", "_info")
        }
        for registry in registries
        for family in registry.collect()
    }


def known() -> dict[str, set[str]]:
    return families(EngineMetrics("model").registry, OperatorMetrics().registry, gateway_registry())


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bfastgen_[a-z_0-9]+\b(?=\{)", expression))


def test_the_committed_dashboards_are_up_to_date() -> None:
    held = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert held == rendered(), "run: cd charts && python -m dashboards"
    assert set(held) == {f"fastgen-{name}.json" for name in NAMES}


def test_every_query_uses_existing_metrics_and_the_dashboards_variables() -> None:
    samples = set().union(*known().values())
    for dashboard in DASHBOARDS:
        variables = {each["name"] for each in dashboard["templating"]["list"]} | {"__rate_interval"}
        for query in [*queries(dashboard), *event_queries(dashboard)]:
            names = metrics_in(query.expression)
            assert names, query
            assert names <= samples, query
            assert set(re.findall(r"\$(\w+)", query.expression)) <= variables, query
            # Writes are the operator's, not those of a FastGenDeployment.
            selectors = re.findall(r"(\w+){([^}]*)}", query.expression)
            chosen = [text for name, text in selectors if name != "fastgen_operator_writes_total"]
            assert all(any(choice in text for choice in CHOICES) for text in chosen), query
        for selector, _ in variable_queries(dashboard):
            assert re.match(r"fastgen_\w+", selector)[0] in samples  # type: ignore[index]


def test_each_dashboard_has_its_variables_and_panels_take_the_chosen_data_source() -> None:
    expected = {
        "fleet": ["namespace"],
        "deployment": ["namespace", "deployment", "pod"],
        "autoscaling": ["namespace", "deployment"],
        "operator": ["pod"],
        "model-cache": ["namespace"],
        "gateway": ["pod"],
    }
    for dashboard in DASHBOARDS:
        names = [each["name"] for each in dashboard["templating"]["list"]]
        assert names == ["datasource", *expected[dashboard["uid"].removeprefix("fastgen-")]]
        assert {panel["datasource"]["uid"] for panel in panels(dashboard)} == {"${datasource}"}


def test_every_metric_is_on_a_panel_or_left_out_for_a_reason() -> None:
    shown = set().union(*(metrics_in(query.expression) for each in DASHBOARDS for query in queries(each)))
    absent = {name for name, samples in known().items() if not samples & shown}
    assert absent == set(NOT_SHOWN)
    assert all(reason.endswith(".") for reason in NOT_SHOWN.values())


def test_dashboards_of_deployments_show_scaling_decisions_and_rollouts() -> None:
    for dashboard in DASHBOARDS:
        is_of_a_program = dashboard["title"].endswith(("Operator", "Gateway"))
        expected = [] if is_of_a_program else ["Scaling decisions", "Rollouts"]
        assert [query.title for query in event_queries(dashboard)] == expected


def test_the_row_of_the_canary_compares_the_revisions(tmp_path: Path) -> None:
    """The canary has a tenth of the requests, and fails a quarter of them; the present revision rejects none."""
    variables = {"namespace": "prod", "deployment": "chat", "__rate_interval": "5m"}
    (dashboard,) = (each for each in DASHBOARDS if each["uid"] == "fastgen-deployment")
    compared = [query for query in queries(dashboard) if "by revision" in query.title]
    found = {query.title: fill(query.expression, variables) for query in compared}
    series = {
        'request_success_total{finish_reason="stop",deployment="chat"}': "0+72x30",
        'request_success_total{finish_reason="length",deployment="chat"}': "0+18x30",
        'request_success_total{finish_reason="stop",deployment="chat_canary"}': "0+7.5x30",
        'request_success_total{finish_reason="out_of_memory",deployment="chat_canary"}': "0+1x30",
        'request_rejected_total{reason="queue_full",deployment="chat_canary"}': "0+1.5x30",
        # The client's fault.
        'request_rejected_total{reason="invalid_request",deployment="chat_canary"}': "0+50x30",
        'request_success_total{finish_reason="stop",deployment="another"}': "0+50x30",
        'time_to_first_token_seconds_sum{deployment="chat"}': "0+45x30",
        'time_to_first_token_seconds_count{deployment="chat"}': "0+90x30",
        'inter_token_latency_seconds_sum{deployment="chat_canary"}': "0+2x30",
        'inter_token_latency_seconds_count{deployment="chat_canary"}': "0+100x30",
    }
    expected = {
        "Share of the requests by revision": {"chat": 0.9, "chat_canary": 0.1},
        "Failed requests by revision": {"chat": 0, "chat_canary": 0.25},
        "Mean time to first token by revision": {"chat": 0.5},
        "Mean inter-token latency by revision": {"chat_canary": 0.02},
    }
    assert found.keys() == expected.keys()
    samples = {
        title: [{"labels": f'{{fastgen_dev_deployment="{name}"}}', "value": value} for name, value in values.items()]
        for title, values in expected.items()
    }
    test = {
        "interval": "1m",
        "input_series": [
            {
                "series": "fastgen_" + name.replace("deployment=", 'namespace="prod",pod="a",fastgen_dev_deployment='),
                "values": values,
            }
            for name, values in series.items()
        ],
        "promql_expr_test": [
            {"expr": f"round({found[title]}, 0.001)", "eval_time": "20m", "exp_samples": samples[title]}
            for title in expected
        ],
    }
    (tmp_path / "canary.yaml").write_text(json.dumps({"rule_files": [], "evaluation_interval": "1m", "tests": [test]}))
    assert "SUCCESS" in run([ensure_promtool(), "test", "rules", tmp_path / "canary.yaml"])


def test_dashboards_link_to_each_other_and_keep_their_variables() -> None:
    assert len({dashboard["uid"] for dashboard in DASHBOARDS}) == len(NAMES)
    for dashboard in DASHBOARDS:
        (link,) = dashboard["links"]
        assert set(link["tags"]) <= set(dashboard["tags"])
        assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)


def test_a_variable_is_filled_in_wherever_it_stands() -> None:
    filled = fill('a{x="$namespace"}[$__rate_interval]', {"namespace": "one", "__rate_interval": "8s"})
    assert filled == 'a{x="one"}[8s]'
    with pytest.raises(KeyError):
        fill("$unknown", {})


def test_a_picture_shows_the_data_of_a_dashboard() -> None:
    (dashboard,) = [each for each in DASHBOARDS if each["uid"] == "fastgen-model-cache"]
    asked = []

    def run(expression: str) -> list[Series]:
        asked.append(expression)
        labels = {"namespace": "one", "name": "chat", "reason": "Cached", "kind": "Job"}
        return [Series(labels, [(at, 3.0) for at in range(1000, 1060, 2)])]

    span = Span(1000, 1060, 2)
    full, empty = (Image.open(io.BytesIO(draw(dashboard, each, span))) for each in (run, lambda _: []))
    expected = {query.expression for query in [*queries(dashboard), *event_queries(dashboard)]}
    assert set(asked) == expected
    assert full.size == empty.size
    assert full.size[0] == 1200
    assert full.convert("RGB").tobytes() != empty.convert("RGB").tobytes()


def test_the_page_shows_a_small_picture_of_each_dashboard() -> None:
    page = ROOT / "docs" / "monitoring.md"
    named = re.findall(r"!\[.+\]\((images/dashboards/.+\.png)\)", page.read_text())
    assert named == [f"images/dashboards/{each['uid'].removeprefix('fastgen-')}.png" for each in DASHBOARDS]
    assert all(0 < (page.parent / name).stat().st_size < 150_000 for name in named)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "percentunit", "50 %"),
        (0.0, "s", "0 s"),
        (0.0123, "s", "12.3 ms"),
        (0.00002, "s", "20 µs"),
        (90.0, "s", "1.5 min"),
        (12345.0, "short", "12.3 k"),
        (2.0, "reqps", "2 req/s"),
        (3.0, "none", "3"),
        (math.nan, "short", "-"),
    ],
)
def test_values_are_shown_with_their_units(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_every_panel_has_a_title_a_description_and_its_own_position() -> None:
    for dashboard in DASHBOARDS:
        places = set()
        for panel in panels(dashboard):
            assert panel["title"]
            assert panel["description"].endswith("."), panel["title"]
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            places.add((place["x"], place["y"]))
            letters = [target["refId"] for target in panel["targets"]]
            assert len(set(letters)) == len(letters)
        assert len(places) == len(panels(dashboard))


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
    text = dump_all(helm.render("--set", "dashboards.enabled=false"))
    assert "kind: ConfigMap" not in text
