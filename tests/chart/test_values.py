"""The schema of the chart's values is strict everywhere, and the reference page describes every value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from chart_files.files import CHART, texts
from chart_files.values_page import read_values, resolve
from cluster.commands import CommandError
from harness.chart import Helm

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEXT = (CHART / "values.yaml").read_text()
# Maps whose fields only the API server knows.
FREE = {
    "global",
    "nodeAffinity",
    "podAffinity",
    "podAntiAffinity",
    "valueFrom",
    "seLinuxOptions",
    "seccompProfile",
    "appArmorProfile",
    "windowsOptions",
    "volume.*",
}


def nodes(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and content of every schema in a schema."""
    yield path, schema
    for name, child in {**schema.get("definitions", {}), **schema.get("properties", {})}.items():
        yield from nodes(child, f"{path}.{name}".lstrip("."))
    for word, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(schema.get(word), dict):
            yield from nodes(schema[word], f"{path}{mark}")


def test_no_rule_stands_beside_a_reference() -> None:
    """Draft-07 ignores all words beside `$ref`."""
    assert [path for path, schema in nodes(SCHEMA) if "$ref" in schema and len(schema) > 1] == []


def test_every_map_names_its_fields_and_every_list_its_items() -> None:
    loose = set()
    for path, schema in nodes(SCHEMA):
        if "$ref" in schema:
            continue
        assert "type" in schema or "enum" in schema, path
        if schema.get("type") == "array":
            assert "items" in schema, path
        if schema.get("type") == "object" and schema.get("additionalProperties", True) is True:
            loose.add(path if path.endswith(".*") else path.rpartition(".")[2])
    assert loose == FREE


def test_defaults_cannot_be_removed() -> None:
    def check(schema: dict[str, Any], given: dict[str, Any], path: str) -> None:
        known = resolve(schema, SCHEMA)
        if "properties" not in known or not given:
            return
        helms = set() if path else {"global", "enabled"}
        assert set(known["properties"]) - helms == set(given), path
        assert path.endswith("esources") or set(known["required"]) == set(given), path
        for name, value in given.items():
            if isinstance(value, dict):
                check(known["properties"][name], value, f"{path}.{name}".lstrip("."))

    check(SCHEMA, yaml.safe_load(TEXT), "")


def test_every_value_is_described() -> None:
    values = read_values(TEXT, SCHEMA)
    assert len(values) > 50
    assert [value.path for value in values if not value.description.endswith(".")] == []
    assert [
        value.path for value in read_values(TEXT.replace("# -- Log format.", "#"), SCHEMA) if not value.description
    ] == ["operator.logFormat"]


def test_the_generated_files_are_current(helm: Helm) -> None:
    for path, text in texts(helm.program).items():
        assert path.read_text() == text, f"{path.name}: run `make generate`"


@pytest.mark.parametrize("dns", ["[]", "[{}]", '[{"namespaceSelector": "kube-system"}]'])
def test_dns_peers_cannot_be_opened_to_everyone(helm: Helm, dns: str) -> None:
    with pytest.raises(CommandError, match="/engine/networkPolicy/dns"):
        helm.render("--set-json", f"engine.networkPolicy.dns={dns}")
