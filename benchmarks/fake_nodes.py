"""Fake nodes and pods, by kwok on a real control plane, for benchmarks of the operator at scale."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.commands import print_to_stderr as say
from cluster.commands import run
from cluster.controlplane import ControlPlane
from cluster.processes import Processes

KWOK = "0.7.0"
PODS_PER_NODE = 250


def ensure_kwok() -> Path:
    """Return the path of kwok. Builds it from its Go module if the user's cache has none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastgen" / f"kwok-{KWOK}"
    if not (folder / "kwok").exists():
        say(f"building kwok {KWOK} (minutes)")
        environment = {**os.environ, "GOBIN": str(folder), "CGO_ENABLED": "0"}
        command = ["go", "install", "-trimpath", "-ldflags", "-s -w", f"sigs.k8s.io/kwok/cmd/kwok@v{KWOK}"]
        subprocess.run(command, env=environment, check=True)
    return folder / "kwok"


@contextmanager
def fake_nodes(plane: ControlPlane, count: int, addresses: str = "10.128.0.0/9") -> Iterator[None]:
    """Create `count` fake nodes whose pods report that they run, at addresses of that range."""
    processes = Processes(plane.folder / "kwok")
    arguments = ["--manage-all-nodes=true", "--node-lease-duration-seconds=200", f"--cidr={addresses}"]
    # An argument must contain the folder of the processes, so the kubeconfig is copied there.
    kubeconfig = plane.folder / "kwok" / "kubeconfig"
    kubeconfig.parent.mkdir(exist_ok=True)
    kubeconfig.write_bytes(plane.kubeconfig.read_bytes())
    processes.start("kwok", [ensure_kwok(), f"--kubeconfig={kubeconfig}", *arguments])
    try:
        capacity = {"cpu": "1000", "memory": "4Ti", "pods": str(PODS_PER_NODE)}
        nodes = [
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": f"fake-{number}",
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                    "labels": {"kubernetes.io/hostname": f"fake-{number}", "kubernetes.io/os": "linux"},
                },
                "status": {"capacity": capacity, "allocatable": capacity},
            }
            for number in range(count)
        ]
        create(plane, nodes)
        plane.kubectl("wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s")
        yield
    finally:
        processes.stop("kwok", patience=5)


def create(plane: ControlPlane, objects: list[dict[str, Any]]) -> None:
    """Create many objects with one command."""
    many = {"apiVersion": "v1", "kind": "List", "items": objects}
    command = [plane.programs / "kubectl", f"--kubeconfig={plane.kubeconfig}", "create", "--filename", "-"]
    run(command, stdin=json.dumps(many), timeout=600)
