"""The commands that make a kind cluster, with programs that only record their calls: there is no Docker here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import kind

# Remembers its cluster in a file, as kind does in Docker.
FAKE_KIND = """#!/bin/sh
here=$(dirname "$0")
echo "kind $*" >> "$here/calls"
case "$1 $2" in
  "get clusters") cat "$here/clusters" 2>/dev/null || echo "No kind clusters found." >&2 ;;
  "create cluster") echo "${3#--name=}" > "$here/clusters" ;;
  "delete cluster") rm -f "$here/clusters" ;;
  "get kubeconfig") echo "a kubeconfig" ;;
esac
"""
FAKE_KUBECTL = """#!/bin/sh
echo "kubectl $*" >> "$(dirname "$0")/calls"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name, text in (("kind", FAKE_KIND), ("kubectl", FAKE_KUBECTL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def calls(programs: Path) -> list[str]:
    """Return the calls since the last time, and forget them."""
    text = (programs / "calls").read_text()
    (programs / "calls").unlink()
    return text.splitlines()


def test_a_cluster_is_created_once_with_gpus_and_its_kubeconfig_is_written(programs: Path) -> None:
    kubeconfig = programs / "state" / "kind.kubeconfig"
    said: list[str] = []
    for is_first in (True, False):
        kind.up(programs / "kind", programs / "kubectl", kubeconfig, said.append)
        created = [call for call in calls(programs) if call.startswith("kind create")]
        expected = [f"kind create cluster --name=fastgen --kubeconfig={kubeconfig} --wait=180s"]
        assert created == (expected if is_first else [])
        assert kubeconfig.read_text() == "a kubeconfig\n"
    assert said == ["creating a cluster with kind"]


def test_the_node_of_kind_advertises_gpus(programs: Path) -> None:
    kind.up(programs / "kind", programs / "kubectl", programs / "kubeconfig", lambda _: None)
    (patch,) = [call for call in calls(programs) if call.startswith("kubectl")]
    assert " patch node fastgen-control-plane --subresource=status --type=merge " in patch
    assert json.loads(patch.partition("--patch=")[2]) == {"status": {"capacity": {"nvidia.com/gpu": "1"}}}


def test_images_are_loaded_into_the_cluster_and_it_is_deleted(programs: Path) -> None:
    kind.load_image(programs / "kind", "engine:1")
    kind.load_archive(programs / "kind", Path("/images/engine.tar"))
    kind.down(programs / "kind")
    assert calls(programs) == [
        "kind load docker-image --name=fastgen engine:1",
        "kind load image-archive --name=fastgen /images/engine.tar",
        "kind delete cluster --name=fastgen",
    ]
