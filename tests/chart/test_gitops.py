"""The chart as Flux, Argo CD and umbrella charts use it: other versions, names that look like numbers, long names."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.controlplane import ControlPlane
from cluster.programs import ensure_programs
from harness.chart import CHART, CRD_CHART, Helm
from support.manifests import SafeLoader, dump_all
from support.namespace import Object

LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
LONGEST_RELEASE = "a" * 53
# What Flux appends to the version of a chart from git, and more than a label holds.
VERSIONS = ("0.1.0", "0.1.0+1.a1b2c3d4e5f6", f"0.1.0-{'x' * 80}+build.7")
NUMBERS = ("1234", "1e3", "0777", "true", "null", "off", "0x1f")
EVERYTHING = (
    *("--set", "operator.replicas=2", "--set-string", "operator.priorityClassName=1234"),
    *("--set", "operator.podMonitor.enabled=true", "--set", "operator.networkPolicy.enabled=true"),
    *("--set", "prometheusRule.enabled=true", "--set", "dashboards.enabled=true"),
    *("--set-string", "operator.podLabels.app\\.kubernetes\\.io/name=mine,operator.podLabels.team=1234"),
    *("--set-string", "monitoring.podMonitorLabels.app\\.kubernetes\\.io/version=2"),
    *("--set-string", "dashboards.labels.helm\\.sh/chart=mine,prometheusRule.labels.app\\.kubernetes\\.io/instance=x"),
)
SERVICE = ("--set", "operator.serviceMonitor.enabled=true", "--show-only", "templates/servicemonitor.yaml")
# Their CRDs are not installed.
OPTIONAL = ("PodMonitor", "PrometheusRule", "ServiceMonitor")


class _Strict(SafeLoader):
    """Rejects repeated keys, as kustomize and Flux do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = {str(key) for key in keys if keys.count(key) > 1}
        assert not repeated, f"repeated keys {repeated} at {node.start_mark}"
        return super().construct_mapping(node, deep)


@pytest.fixture(scope="module")
def helm() -> Helm:
    return Helm(ensure_programs() / "helm")


def rendered(helm: Helm, release: str, namespace: str, chart: Path, *args: str) -> list[Object]:
    text = helm.run("template", release, str(chart), "--namespace", namespace, *args)
    return [each for each in yaml.load_all(text, Loader=_Strict) if each]


def strings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the labels, annotations, names and namespaces of an object with their paths."""
    if isinstance(value, dict):
        for name, field in value.items():
            here = f"{path}.{name}"
            if name in ("name", "namespace", "serviceAccountName", "priorityClassName"):
                yield here, field
            elif name in ("labels", "annotations", "matchLabels") and isinstance(field, dict):
                yield from ((f"{here}.{key}", label) for key, label in field.items())
            else:
                yield from strings(field, here)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from strings(item, f"{path}[{index}]")


def check(objects: list[Object]) -> None:
    for obj in objects:
        for path, value in strings(obj if obj["kind"] != "CustomResourceDefinition" else obj["metadata"]):
            assert isinstance(value, str), (obj["kind"], path, value)
        for name, value in obj["metadata"].get("labels", {}).items():
            assert LABEL.fullmatch(value), (obj["kind"], name, value)
            assert len(value) <= 63, (obj["kind"], name, value)


def packaged(helm: Helm, chart: Path, version: str, folder: Path) -> Path:
    helm.run("package", str(chart), "--version", version, "--app-version", version, "--destination", str(folder))
    (found,) = folder.glob("*.tgz")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_any_version_makes_valid_labels(version: str, helm: Helm, tmp_path: Path) -> None:
    objects = rendered(helm, "fastgen", "models", packaged(helm, CHART, version, tmp_path), *EVERYTHING)
    check(objects)
    chart = {obj["metadata"]["labels"]["helm.sh/chart"] for obj in objects if obj["kind"] == "Deployment"}
    assert chart == {f"fastgen-{version}".replace("+", "_")[:63]}


@pytest.mark.parametrize("name", NUMBERS)
def test_names_that_yaml_reads_as_something_else_stay_strings(name: str, helm: Helm) -> None:
    watched = ("--set-string", f"watchNamespaces={{{name}}}", "--set-string", f"serviceAccount.name={name}")
    for args in ((), watched):
        objects = rendered(helm, name, name, CHART, *EVERYTHING, *args)
        check(objects)
        namespaces = {obj["metadata"]["namespace"] for obj in objects if "namespace" in obj["metadata"]}
        assert namespaces == {name}


def test_labels_of_a_value_are_merged_and_never_replace_those_of_selectors(helm: Helm) -> None:
    objects = rendered(helm, "fastgen", "models", CHART, *EVERYTHING)
    (deployment,) = [obj for obj in objects if obj["kind"] == "Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["team"] == "1234"
    (monitor,) = [obj for obj in objects if obj["kind"] == "PodMonitor"]
    assert monitor["metadata"]["labels"]["app.kubernetes.io/version"] == "2"


@pytest.mark.parametrize("alias", ["fastgen", "llm"])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_chart_can_be_a_conditional_dependency(alias: str, enabled: bool, helm: Helm, tmp_path: Path) -> None:
    umbrella = tmp_path / "umbrella"
    umbrella.mkdir()
    dependency = {"name": "fastgen", "version": ">=0-0", "repository": f"file://{CHART}", "alias": alias}
    chart = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0"}
    chart |= {"dependencies": [{**dependency, "condition": f"{alias}.enabled"}]}  # type: ignore[dict-item]
    values = {alias: {"enabled": enabled, "operator": {"replicas": 2}}, "global": {"imageRegistry": "registry.example"}}
    (umbrella / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (umbrella / "values.yaml").write_text(yaml.safe_dump(values))
    helm.run("dependency", "build", str(umbrella))
    objects = rendered(helm, "umbrella", "models", umbrella)
    check(objects)
    assert [obj["spec"]["replicas"] for obj in objects if obj["kind"] == "Deployment"] == ([2] if enabled else [])


@pytest.mark.controlplane
def test_the_api_server_accepts_the_chart_under_all_of_these_names(helm: Helm, tmp_path: Path) -> None:
    chart = packaged(helm, CHART, VERSIONS[-1], tmp_path)
    with ControlPlane(ensure_programs()) as plane:
        for release, namespace in (("1234", "5678"), (LONGEST_RELEASE, "b" * 63), ("fastgen", "models")):
            plane.kubectl("create", "namespace", namespace)
            objects = rendered(helm, release, namespace, chart, *EVERYTHING)
            objects += rendered(helm, release, namespace, chart, *SERVICE)
            # A pod is only accepted if its ServiceAccount exists.
            accepted = [obj for obj in objects if obj["kind"] not in (*OPTIONAL, "Pod")]
            assert len(accepted) > 10
            words = ("apply", "--server-side", "--dry-run=server", "--filename", "-")
            plane.kubectl(*words, stdin=dump_all(accepted))


def test_the_chart_of_the_crd_has_any_version(helm: Helm, tmp_path: Path) -> None:
    check(rendered(helm, "1234", "5678", packaged(helm, CRD_CHART, VERSIONS[1], tmp_path)))
