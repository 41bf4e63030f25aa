"""CRDs of other projects, from their published Go modules."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cluster.commands import run
from support.manifests import load


@dataclass(frozen=True)
class Definition:
    """A CRD in a Go module; `digest` is the module's hash, as in go.sum."""

    module: str
    version: str
    digest: str
    path: str

    def fetch(self) -> dict[str, Any]:
        """Return the CRD, downloaded into Go's module cache if necessary.

        Raises CommandError if the download fails, RuntimeError if the digest differs.
        """
        go = shutil.which("go")
        if go is None:
            raise RuntimeError("go: not found; install Go 1.24 or later")
        with tempfile.TemporaryDirectory() as outside:  # outside any module, whose go.mod would influence the download
            command = [go, "-C", outside, "mod", "download", "-json", f"{self.module}@{self.version}"]
            found = json.loads(run(command, environment={**os.environ, "GOFLAGS": "-mod=mod"}))
        if found["Sum"] != self.digest:
            raise RuntimeError(f"{self.module} {self.version}: {found['Sum']} instead of {self.digest}")
        crd: dict[str, Any] = load((Path(found["Dir"]) / self.path).read_text())
        return crd


POD_MONITOR_CRD: Final = Definition(
    "github.com/prometheus-operator/prometheus-operator",
    "v0.85.0",
    "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
    "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
)
PROMETHEUS_RULE_CRD: Final = replace(
    POD_MONITOR_CRD, path="example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml"
)
SERVICE_MONITOR_CRD: Final = replace(
    POD_MONITOR_CRD, path="example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml"
)
INFERENCE_POOL_CRD: Final = Definition(
    "sigs.k8s.io/gateway-api-inference-extension",
    "v1.3.0",
    "h1:Ng2Qs1Oum4WycuWyi3rOkAC7pZ2aDqgN2ku6Lr/mryQ=",
    "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
)
HTTP_ROUTE_CRD: Final = Definition(
    "sigs.k8s.io/gateway-api",
    "v1.3.0",
    "h1:q6okN+/UKDATola4JY7zXzx40WO4VISk7i9DIfOvr9M=",
    "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
)
SCALED_OBJECT_CRD: Final = Definition(
    "github.com/kedacore/keda/v2",
    "v2.17.2",
    "h1:xlrcK5TKABJF9PebK79sgL07s/csGjL3H4m72OkZXxk=",
    "config/crd/bases/keda.sh_scaledobjects.yaml",
)
