"""The bare control plane works, is isolated from others and cleans up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.commands import CommandError
from cluster.controlplane import ControlPlane, remove_abandoned
from cluster.processes import all_pids, names_folder
from cluster.programs import ensure_programs
from cluster.waiting import wait_for

pytestmark = pytest.mark.controlplane

OWNER = """
import sys
from pathlib import Path
from cluster.controlplane import ControlPlane
plane = ControlPlane(Path(sys.argv[1]))
plane.start()
print(plane.folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane(ensure_programs(), scheduler=True) as plane:
        yield plane


def running(folder: Path) -> list[int]:
    return [pid for pid in all_pids() if names_folder(pid, folder)]


def test_a_deployment_gets_a_pod_that_is_scheduled(plane: ControlPlane) -> None:
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "made-up"},
        "status": {"capacity": {"pods": "10"}, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    plane.kubectl("create", "-f", "-", stdin=json.dumps(node))
    with contextlib.suppress(CommandError):  # the node controller may have removed it already
        plane.kubectl("taint", "node", "made-up", "node.kubernetes.io/not-ready-")
    plane.kubectl("create", "deployment", "web", "--image=web:1")
    wait_for(
        "the pod has a node",
        lambda: plane.kubectl("get", "pods", "-o=jsonpath={.items[*].spec.nodeName}") == "made-up",
        seconds=300,
        every=0.2,
    )


def test_a_client_has_the_permissions_of_its_groups(plane: ControlPlane) -> None:
    plane.kubectl("create", "clusterrolebinding", "readers", "--clusterrole=view", "--group=readers")
    reader = plane.kubeconfig_for("reader", "eve", ["readers"])
    stranger = plane.kubeconfig_for("stranger", "eve")
    assert plane.kubectl("get", "pods", f"--kubeconfig={reader}", "-o=name") is not None
    with pytest.raises(CommandError, match="forbidden"):
        plane.kubectl("get", "pods", f"--kubeconfig={stranger}")


def test_two_control_planes_are_isolated_and_clean_up(plane: ControlPlane) -> None:
    with ControlPlane(plane.programs) as other:
        folder = other.folder
        other.kubectl("create", "namespace", "only-here")
        assert "only-here" not in plane.kubectl("get", "namespaces")
        assert len(running(folder)) == 3
    assert running(folder) == []
    assert not folder.exists()
    assert plane.kubectl("get", "--raw=/readyz") == "ok"


def test_a_control_plane_of_a_killed_owner_is_removed(plane: ControlPlane) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(plane.programs)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        owner.send_signal(signal.SIGKILL)
    assert len(running(folder)) == 3
    remove_abandoned(folder.parent)
    assert running(folder) == []
    assert not folder.exists()


def test_kubectl_before_start_raises_an_error(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path)
    plane.stop()
    with pytest.raises(RuntimeError, match="not started"):
        plane.kubectl("get", "pods")
