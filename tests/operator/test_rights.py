"""The operator with a Role in one namespace instead of a ClusterRole."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from cluster.programs import ensure_programs
from harness.chart import SYSTEM, install, operator_kubeconfig
from harness.process import OperatorProcess
from harness.space import Space, resource

pytestmark = pytest.mark.controlplane


def test_an_operator_of_one_namespace_needs_and_touches_no_other(tmp_path: Path) -> None:
    with ControlPlane(ensure_programs()) as plane:
        for name in (SYSTEM, "mine", "theirs"):
            plane.kubectl("create", "namespace", name)
        install(plane, "--set", "watchNamespaces={mine}")
        plane.kubectl("wait", "--for=condition=Established", "crd/fastgendeployments.fastgen.dev", "--timeout=30s")
        cluster_wide = plane.kubectl(
            *("get", "clusterroles,clusterrolebindings", "--output", "name"),
            *("--selector", "app.kubernetes.io/name=fastgen-operator"),
        )
        assert cluster_wide == ""
        operator = OperatorProcess(operator_kubeconfig(plane), tmp_path / "log", ["--namespace", "mine"])
        operator.start()
        try:
            mine, theirs = Space(plane, "mine"), Space(plane, "theirs")
            theirs.apply(resource())
            mine.apply(resource())
            mine.make_ready()
            mine.wait_condition("Ready", "True", "AllReplicasReady")
            assert theirs.condition("Ready") == {}
            assert theirs.items("deployments") == []
        finally:
            assert operator.stop() == 0
        assert "orbidden" not in operator.log.read_text()
