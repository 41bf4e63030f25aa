"""`install.yaml`: the chart with its default values as one file for `kubectl apply`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

NAMESPACE: Final = "fastgen-system"
_HEADER: Final = """\
# The FastGen operator for `kubectl apply --server-side -f install.yaml`, without helm.
# Generated from charts/fastgen with its default values by `make generate`.
"""


def install_manifest(helm: Path, chart: Path) -> str:
    """Return the text of `install.yaml`. Runs the program `helm`; raises CalledProcessError if it fails."""
    command: list[str | Path] = [helm, "template", "fastgen", chart, "--namespace", NAMESPACE, "--skip-tests"]
    # Grafana's sidecar is a choice of the cluster, and the dashboards are most of the text.
    command += ["--set", "dashboards.enabled=false"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    objects = [_without_helm(obj) for obj in yaml.safe_load_all(done.stdout) if obj]
    # The CRD comes before its users; the order of the others is helm's.
    objects.sort(key=lambda obj: bool(obj["kind"] != "CustomResourceDefinition"))
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    return _HEADER + yaml.dump_all([namespace, *objects], Dumper=_Dumper, sort_keys=False, width=110)


def _without_helm(obj: dict[str, Any]) -> dict[str, Any]:
    """Remove what says that helm manages the object."""
    for metadata in (obj["metadata"], obj.get("spec", {}).get("template", {}).get("metadata", {})):
        for field in ("labels", "annotations"):
            kept = {
                name: value
                for name, value in metadata.pop(field, {}).items()
                if not name.startswith("helm.sh/") and (name, value) != ("app.kubernetes.io/managed-by", "Helm")
            }
            if kept:
                metadata[field] = kept
    return obj


class _Dumper(yaml.SafeDumper):
    """Dumps equal objects in full instead of as YAML anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True
