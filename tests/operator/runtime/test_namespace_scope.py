"""The operator with a Role in one namespace instead of a ClusterRole, started before its CRD and permissions exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from cluster.programs import ensure_programs
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, POD
from harness.chart import SYSTEM, install, operator_kubeconfig
from harness.process import OperatorProcess
from harness.space import Space, resource
from harness.thief import changed, deployment, dry
from harness.user import refusal, server_of
from support.waiting import eventually

pytestmark = pytest.mark.controlplane


def test_an_operator_of_one_namespace_waits_for_its_crd_and_permissions_and_needs_no_others(tmp_path: Path) -> None:
    with ControlPlane(ensure_programs()) as plane:
        for name in (SYSTEM, "mine", "theirs"):
            plane.kubectl("create", "namespace", name)
        operator = OperatorProcess(operator_kubeconfig(plane), tmp_path / "log", ["--namespace", "mine"])
        operator.launch()
        try:
            eventually(lambda: "listing fastgendeployments" in operator.log.read_text(), within=20, what="a complaint")
            install(plane, "--set", "watchNamespaces={mine}")
            eventually(operator.is_ready, within=30, what="a ready operator")
            complaints = len(operator.log.read_text())
            mine, theirs = Space(plane, "mine"), Space(plane, "theirs")
            theirs.apply(resource())
            mine.apply(resource())
            mine.make_ready()
            mine.wait_condition("Ready", "True", "AllReplicasReady")
            operator.let_resyncs_pass(2)
            assert theirs.condition("Ready") == {}
            assert theirs.items("deployments") == []
        finally:
            assert operator.stop() == 0
        assert "orbidden" not in operator.log.read_text()[complaints:]
        cluster_wide = plane.kubectl(
            *("get", "clusterroles,clusterrolebindings", "--output", "name"),
            *("--selector", "app.kubernetes.io/name=fastgen-operator"),
        )
        assert cluster_wide == ""
        thief = server_of(str(operator_kubeconfig(plane)))
        made = deployment(mine.get("fgd", "chat"))
        assert "cannot patch resource" in dry(thief, DEPLOYMENT, changed(made, ("metadata", "namespace"), "theirs"))
        for path in ("/api/v1/nodes", POD.path(None), POD.path("theirs"), FASTGEN.path("theirs")):
            assert "cannot list resource" in refusal(thief, "GET", path), path
        assert refusal(thief, "GET", POD.path("mine")) == ""
