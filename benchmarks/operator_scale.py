"""Convergence time and steady-state cost of the operator with a thousand FastGenDeployments.

API server, etcd, controller-manager and scheduler are real. Nodes and pods are kwok's, which only report that they run.
The operator runs with the chart's RBAC and default settings. The API server counts its requests.

    python benchmarks/operator_scale.py [--deployments 1000] [--replicas 5] [--steady-seconds 120] [--json FILE]

Needs Go if kwok or the Kubernetes programs must be built first, and about 4 GiB of memory for the default size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "operator", "tests")]

import httpx  # noqa: E402
from fake_nodes import PODS_PER_NODE, create, fake_nodes  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from cluster.commands import print_to_stderr as say  # noqa: E402
from cluster.controlplane import ControlPlane, free_ports  # noqa: E402
from cluster.programs import ensure_programs  # noqa: E402
from cluster.waiting import wait_for  # noqa: E402
from harness.chart import SYSTEM, install, operator_kubeconfig  # noqa: E402
from harness.space import resource  # noqa: E402

NAMESPACES = 10
READY, WRITES = "fastgen_operator_ready_replicas", "fastgen_operator_writes_total"
TICKS = os.sysconf("SC_CLK_TCK")
# Counts the operator's requests. The priority level is that of all service accounts.
FLOW_SCHEMA: dict[str, Any] = {
    "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
    "kind": "FlowSchema",
    "metadata": {"name": "fastgen-operator"},
    "spec": {
        "priorityLevelConfiguration": {"name": "workload-low"},
        "matchingPrecedence": 500,
        "distinguisherMethod": {"type": "ByUser"},
        "rules": [
            {
                "subjects": [{"kind": "User", "user": {"name": f"system:serviceaccount:{SYSTEM}:fastgen-operator"}}],
                "resourceRules": [
                    {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"], "namespaces": ["*"], "clusterScope": True}
                ],
                "nonResourceRules": [{"nonResourceURLs": ["*"], "verbs": ["*"]}],
            }
        ],
    },
}


@dataclass
class Figures:
    """Results in seconds and MiB; CPU in percent of one core."""

    deployments: int
    pods: int
    converged_seconds: float = 0.0
    converged_cpu_seconds: float = 0.0
    converged_requests: int = 0
    restart_seconds: float = 0.0
    restart_writes: int = 0
    restart_cpu_seconds: float = 0.0
    steady_seconds: float = 0.0
    steady_cpu_percent: float = 0.0
    steady_requests_per_minute: float = 0.0
    steady_writes: int = 0
    edit_seconds: float = 0.0
    memory_mib: float = 0.0
    peak_memory_mib: float = 0.0


class Operator:
    """The operator's process and its resource usage."""

    def __init__(self, plane: ControlPlane, log: Path) -> None:
        self.plane, self.log = plane, log
        self.metrics_port, self.health_port = free_ports(2)
        self._kubeconfig = operator_kubeconfig(plane)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process with default settings."""
        command = [
            *(sys.executable, "-m", "fastgen_operator.main", "--engine-image", "engine:test"),
            *("--bind-address", "127.0.0.1", "--metrics-port", str(self.metrics_port), "--lease-namespace", SYSTEM),
            *("--health-port", str(self.health_port)),
        ]
        environment = {**os.environ, "KUBECONFIG": str(self._kubeconfig), "PYTHONPATH": os.pathsep.join(sys.path[:3])}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def stop(self) -> None:
        """Stop the process if it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process since its start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory_mib(self, field: str) -> float:
        """Return VmRSS (current) or VmHWM (peak) in MiB."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(lines[field].split()[0]) / 1024

    def total(self, name: str) -> float:
        """Return the sum of a metric's samples; 0 if the endpoint does not respond."""
        try:
            text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=20).text
        except httpx.TransportError:
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the operator has exited: {self.log.read_text()[-3000:]}") from None
            return 0.0
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def requests(self) -> int:
        """Return the number of the operator's requests so far."""
        name, label = "apiserver_flowcontrol_dispatched_requests_total", 'flow_schema="fastgen-operator"'
        lines = self.plane.kubectl("get", "--raw", "/metrics").splitlines()
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(name) and label in line)

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None, "the operator is not started"
        return self._process.pid


def deployments(count: int, replicas: int) -> list[dict[str, Any]]:
    """Return FastGenDeployments, spread over the namespaces."""
    found = []
    for number in range(count):
        obj = resource(f"chat-{number}", replicas=replicas, resources={"limits": {"cpu": 1, "memory": "2Gi"}})
        obj["metadata"]["namespace"] = f"team-{number % NAMESPACES}"
        found.append(obj)
    return found


def measure(plane: ControlPlane, operator: Operator, figures: Figures, steady: float) -> None:
    """Measure first convergence, a restart, the steady state and an edit."""
    started = time.monotonic()
    operator.start()
    progress = [started]

    def all_ready() -> bool:
        ready, writes = (
            operator.total("fastgen_operator_ready_replicas"),
            operator.total(WRITES),
        )
        if time.monotonic() - progress[0] > 10:
            progress[0] = time.monotonic()
            say(f"  {time.monotonic() - started:.0f} s: {ready:.0f} of {figures.pods} pods ready, {writes:.0f} writes")
        return ready >= figures.pods

    wait_for("all pods ready", all_ready, seconds=1800, every=3)
    figures.converged_seconds = time.monotonic() - started
    wait_until_quiet(operator)
    figures.converged_cpu_seconds, figures.converged_requests = operator.cpu_seconds(), operator.requests()
    figures.peak_memory_mib = operator.memory_mib("VmHWM")
    operator.stop()
    say("restart")
    started = time.monotonic()
    operator.start()
    wait_for("all resources reconciled", lambda: operator.total(READY) >= figures.pods, seconds=600)
    figures.restart_seconds = time.monotonic() - started
    wait_until_quiet(operator)
    figures.restart_writes = int(operator.total(WRITES))
    figures.restart_cpu_seconds = operator.cpu_seconds()
    say(f"steady state for {steady:.0f} s")
    cpu, requests, writes = operator.cpu_seconds(), operator.requests(), operator.total(WRITES)
    started = time.monotonic()
    time.sleep(steady)
    figures.steady_seconds = elapsed = time.monotonic() - started
    figures.steady_cpu_percent = 100 * (operator.cpu_seconds() - cpu) / elapsed
    figures.steady_requests_per_minute = 60 * (operator.requests() - requests) / elapsed
    figures.steady_writes = int(operator.total(WRITES) - writes)
    figures.memory_mib = operator.memory_mib("VmRSS")
    figures.edit_seconds = edit(plane)


def wait_until_quiet(operator: Operator) -> None:
    """Wait until the operator has written nothing for five seconds."""
    seen: list[float] = [-1.0]

    def quiet() -> bool:
        seen.append(operator.total(WRITES))
        return seen[-1] == seen[-2]

    wait_for("the end of writes", quiet, seconds=300, every=5)


def edit(plane: ControlPlane) -> float:
    """Return the median seconds from an edit of a resource until its Deployment has it, including kubectl."""
    seconds = []
    for number in range(5):
        place = ("--namespace", f"team-{number}")
        started = time.monotonic()
        patch = json.dumps({"spec": {"drainSeconds": 31}})
        plane.kubectl("patch", "fgd", f"chat-{number}", *place, "--type=merge", "--patch", patch)
        path = "jsonpath={.spec.template.spec.terminationGracePeriodSeconds}"

        def done(name: str = f"chat-{number}", place: tuple[str, str] = place, path: str = path) -> bool:
            return plane.kubectl("get", "deployment", name, *place, "--output", path) == "61"

        wait_for("the edit", done, seconds=60, every=0.01)
        seconds.append(time.monotonic() - started)
    return sorted(seconds)[2]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--steady-seconds", type=float, default=120)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    figures = Figures(options.deployments, options.deployments * options.replicas)
    log = Path(f"/tmp/operator-scale-{os.getpid()}.log")
    with ControlPlane(ensure_programs(), scheduler=True) as plane:
        plane.kubectl("create", "namespace", SYSTEM)
        install(plane)
        plane.kubectl("apply", "--filename", "-", stdin=json.dumps(FLOW_SCHEMA))
        for number in range(NAMESPACES):
            plane.kubectl("create", "namespace", f"team-{number}")
        plane.kubectl("wait", "--for=condition=Established", "crd/fastgendeployments.fastgen.dev", "--timeout=30s")
        operator = Operator(plane, log)
        with fake_nodes(plane, -(-figures.pods * 2 // PODS_PER_NODE)):
            say(f"creating {figures.deployments} FastGenDeployments")
            create(plane, deployments(options.deployments, options.replicas))
            try:
                measure(plane, operator, figures, options.steady_seconds)
            finally:
                operator.stop()
    text = json.dumps(asdict(figures), indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
