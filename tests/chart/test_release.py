"""What a release publishes agrees: versions, images, and the metadata for Artifact Hub."""

from __future__ import annotations

import tomllib
from typing import Any

import yaml

from chart_files.files import ROOT
from fastgen_operator.api.crd import custom_resource_definition
from harness.chart import CHART, CRD_CHART, Helm
from support.manifests import load_all

CHARTS = {path.name: yaml.safe_load((path / "Chart.yaml").read_text()) for path in (CHART, CRD_CHART)}
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
HUB: dict[str, str] = CHARTS["fastgen"]["annotations"]


def annotation(name: str) -> Any:
    """Return an annotation of Artifact Hub, which is YAML in a string."""
    return yaml.safe_load(HUB[f"artifacthub.io/{name}"])


def test_package_charts_and_images_have_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {chart["appVersion"] for chart in CHARTS.values()} == {version}
    images = {name: f"fastgen-{name}:{version}" for name in ("operator", "engine", "gateway")}
    assert {name: VALUES[name]["image"] for name in images} == images
    assert {image["name"]: image["image"] for image in annotation("images")} == images
    assert CHARTS["fastgen"]["kubeVersion"] == CHARTS["fastgen-crds"]["kubeVersion"]


def test_artifact_hub_describes_the_crd_with_a_valid_example(helm: Helm) -> None:
    crd = custom_resource_definition()
    (described,) = annotation("crds")
    versions = [version["name"] for version in crd["spec"]["versions"]]
    assert (described["name"], described["kind"]) == (crd["metadata"]["name"], crd["spec"]["names"]["kind"])
    assert described["version"] in versions
    (example,) = annotation("crdsExamples")
    assert example["apiVersion"] == f"{crd['spec']['group']}/{described['version']}"
    for change in annotation("changes"):
        assert change["kind"] in {"added", "changed", "deprecated", "removed", "fixed", "security"}
        assert change["description"].endswith(".")
    (published,) = load_all(helm.run("template", "crds", str(CRD_CHART)))
    assert published["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert published == crd
