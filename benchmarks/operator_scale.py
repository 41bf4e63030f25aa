"""Convergence time and steady-state cost of the operator with a thousand FastGenDeployments.

API server, etcd, controller-manager and scheduler are real. Nodes and pods are kwok's, which only report that they run.
The operator runs with the chart's RBAC, arguments and probes. A prober sends the probes as the kubelet does, and
reports each time when it would have killed the operator. The API server counts the operator's requests.

A fifth of the resources have autoscaling. The operator scrapes their pods at the pods' addresses; the engines there are
simulated (simulated_engines.py), under a constant load that needs the replicas that exist.

    python benchmarks/operator_scale.py [--deployments 1000] [--replicas 5] [--steady-seconds 330] [--json FILE]

The steady state is measured for longer than the interval between two lists of all objects (300 s). Needs root, for the
network of the simulated engines, Go if kwok or the Kubernetes programs must be built first, and about 4 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "operator", "tests")]

import httpx  # noqa: E402
from fake_nodes import PODS_PER_NODE, create, ensure_kwok, fake_nodes  # noqa: E402
from pod_network import BOUND, POD_ADDRESSES, answering_at  # noqa: E402
from prober import Prober  # noqa: E402
from simulated_engines import MODEL  # noqa: E402

from cluster.commands import print_to_stderr as say  # noqa: E402
from cluster.controlplane import ControlPlane, free_ports  # noqa: E402
from cluster.programs import ensure_programs  # noqa: E402
from cluster.waiting import wait_for  # noqa: E402
from harness.chart import SYSTEM, install, operator_kubeconfig  # noqa: E402
from harness.space import resource  # noqa: E402

NAMESPACES = 10
# One of so many resources has autoscaling.
AUTOSCALED = 5
ENGINES = (sys.executable, str(Path(__file__).with_name("simulated_engines.py")))
READY, WRITES = "fastgen_operator_ready_replicas", "fastgen_operator_writes_total"
SCRAPE_AGE = "fastgen_operator_scrape_age_seconds"
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
    autoscaled: int
    pods: int
    ready_seconds: float = 0.0
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
    oldest_scrape_seconds: float = 0.0
    probes: int = 0
    probes_failed: int = 0
    slowest_probe_seconds: float = 0.0
    kills: tuple[str, ...] = ()


class Operator:
    """The operator's process and its resource usage.

    Args:
        container: the operator's container in the rendered chart.
    """

    def __init__(self, plane: ControlPlane, container: dict[str, Any], log: Path) -> None:
        self.plane, self.log = plane, log
        self.metrics_port, self.health_port, self.decisions_port = free_ports(3)
        self.prober = Prober(container, f"http://127.0.0.1:{self.health_port}")
        self._arguments = container["args"]
        self._kubeconfig = operator_kubeconfig(plane)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process with the chart's arguments, and probe it."""
        command = [
            *(*BOUND, sys.executable, "-m", "fastgen_operator.main", *self._arguments),
            *("--bind-address", "127.0.0.1", "--metrics-port", str(self.metrics_port)),
            *("--health-port", str(self.health_port), "--decisions-port", str(self.decisions_port)),
        ]
        environment = {**os.environ, "KUBECONFIG": str(self._kubeconfig), "PYTHONPATH": os.pathsep.join(sys.path[:3])}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.prober.start()

    def stop(self) -> None:
        """Stop the process if it runs."""
        self.prober.stop()
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
        return self.totals(name)[0]

    def totals(self, *names: str) -> list[float]:
        """Return the sum of the samples of each metric."""
        text = self._metrics()
        return [sum(_samples(text, name)) for name in names]

    def num_scraped(self) -> int:
        """Return the number of fleets that were scraped."""
        return len(_samples(self._metrics(), SCRAPE_AGE))

    def oldest_scrape(self) -> float:
        """Return the age of the oldest scrape of a resource with autoscaling, in seconds."""
        names = re.compile(rf'{SCRAPE_AGE}{{name="chat-(\d+)",.*}} (.*)')
        found = (names.fullmatch(line) for line in self._metrics().splitlines())
        return max(float(each[2]) for each in found if each and int(each[1]) % AUTOSCALED == 0)

    def _metrics(self) -> str:
        try:
            return httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=20).text
        except httpx.TransportError:
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"the operator has exited: {self.log.read_text()[-3000:]}") from None
            return ""

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


def _samples(text: str, name: str) -> list[float]:
    """Return a metric's samples, without a parser, which would take a third of a core from what is measured."""
    lines = (line for line in text.splitlines() if line.startswith((name + "{", name + " ")))
    return [float(line.rsplit(" ", 1)[1]) for line in lines]


def table(figures: Figures) -> str:
    """Return the results as the table of docs/benchmarks/operator-scale.md."""
    size = f"{figures.deployments:,} resources, {figures.pods:,} pods, {figures.autoscaled:,} with autoscaling"
    rows = {
        "": size,
        "operator start until it is ready (all objects listed)": f"{figures.ready_seconds:.1f} s",
        "operator start until all pods are ready": f"{figures.converged_seconds:.0f} s",
        "CPU time of the operator until then": f"{figures.converged_cpu_seconds:.0f} s",
        "requests until then, watches included": f"{figures.converged_requests:,}",
        "peak memory until then": f"{figures.peak_memory_mib:.0f} MiB",
        "after a restart: time to reconcile all resources": f"{figures.restart_seconds:.0f} s",
        "CPU time for it": f"{figures.restart_cpu_seconds:.0f} s",
        "**writes after the restart**": f"**{figures.restart_writes}**",
        "**writes in the steady state**": f"**{figures.steady_writes}** in {figures.steady_seconds:.0f} s",
        "requests in the steady state": f"{figures.steady_requests_per_minute:.0f} per minute",
        "CPU in the steady state": f"{figures.steady_cpu_percent:.1f} % of a core",
        "oldest scrape of an autoscaled resource": f"{figures.oldest_scrape_seconds:.1f} s",
        "memory in the steady state, after the restart": f"{figures.memory_mib:.0f} MiB",
        "kubectl edit until the Deployment has it (median of five)": f"{figures.edit_seconds:.1f} s",
        "probes sent, failed (startup and readiness included)": f"{figures.probes}, {figures.probes_failed}",
        "slowest probe": f"{figures.slowest_probe_seconds:.2f} s",
        "**times the kubelet would have killed the operator**": f"**{len(figures.kills)}**",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([lines[0], "|---|---|", *lines[1:]])


def deployments(count: int, replicas: int) -> list[dict[str, Any]]:
    """Return FastGenDeployments, spread over the namespaces."""
    found = []
    for number in range(count):
        size: dict[str, Any] = {"replicas": replicas}
        if number % AUTOSCALED == 0:
            size = {"autoscaling": {"minReplicas": replicas, "maxReplicas": 2 * replicas}}
        obj = resource(f"chat-{number}", **size, resources={"limits": {"cpu": 1, "memory": "2Gi"}})
        obj["spec"]["model"]["servedName"] = MODEL
        obj["metadata"]["namespace"] = f"team-{number % NAMESPACES}"
        found.append(obj)
    return found


def measure(plane: ControlPlane, operator: Operator, figures: Figures, steady: float) -> None:
    """Measure first convergence, a restart, the steady state and an edit."""
    started = time.monotonic()
    operator.start()
    progress = [started]

    def all_ready() -> bool:
        ready, writes = operator.totals(READY, WRITES)
        if time.monotonic() - progress[0] > 10:
            progress[0] = time.monotonic()
            say(f"  {time.monotonic() - started:.0f} s: {ready:.0f} of {figures.pods} pods ready, {writes:.0f} writes")
        return ready >= figures.pods

    # A response has tens of thousands of samples: asking more often would slow down what is measured.
    wait_for("all pods ready", all_ready, seconds=1800, every=5)
    figures.converged_seconds = time.monotonic() - started
    figures.ready_seconds = operator.prober.ready_seconds
    wait_until_quiet(operator)
    figures.converged_cpu_seconds, figures.converged_requests = operator.cpu_seconds(), operator.requests()
    figures.peak_memory_mib = operator.memory_mib("VmHWM")
    wait_until_measured(operator, figures)
    operator.stop()
    say("restart")
    started = time.monotonic()
    operator.start()
    wait_for("all resources reconciled", lambda: operator.total(READY) >= figures.pods, seconds=600, every=2)
    figures.restart_seconds = time.monotonic() - started
    wait_until_quiet(operator)
    figures.restart_writes = int(operator.total(WRITES))
    figures.restart_cpu_seconds = operator.cpu_seconds()
    wait_until_measured(operator, figures)
    say(f"steady state for {steady:.0f} s")
    cpu, requests, writes = operator.cpu_seconds(), operator.requests(), operator.total(WRITES)
    started = time.monotonic()
    time.sleep(steady)
    figures.steady_seconds = elapsed = time.monotonic() - started
    figures.steady_cpu_percent = 100 * (operator.cpu_seconds() - cpu) / elapsed
    figures.steady_requests_per_minute = 60 * (operator.requests() - requests) / elapsed
    figures.steady_writes = int(operator.total(WRITES) - writes)
    figures.memory_mib = operator.memory_mib("VmRSS")
    figures.oldest_scrape_seconds = operator.oldest_scrape()
    figures.edit_seconds = edit(plane)


def wait_until_quiet(operator: Operator) -> None:
    """Wait until the operator has written nothing for five seconds."""
    seen: list[float] = [-1.0]

    def quiet() -> bool:
        seen.append(operator.total(WRITES))
        return seen[-1] == seen[-2]

    wait_for("the end of writes", quiet, seconds=300, every=5)


def wait_until_measured(operator: Operator, figures: Figures) -> None:
    """Wait until each fleet was scraped, those of a fixed size once a minute, and its status has the capacity."""
    wait_for("a scrape of each fleet", lambda: operator.num_scraped() == figures.deployments, seconds=180, every=5)
    wait_until_quiet(operator)


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
    parser.add_argument("--steady-seconds", type=float, default=330)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    # As an exit, so that everything is cleaned up; SIGINT is an exception already.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    autoscaled = -(-options.deployments // AUTOSCALED)
    figures = Figures(options.deployments, autoscaled, options.deployments * options.replicas)
    log = Path(f"/tmp/operator-scale-{os.getpid()}.log")
    ensure_kwok()
    with ControlPlane(ensure_programs(), scheduler=True) as plane, answering_at(ENGINES):
        plane.kubectl("create", "namespace", SYSTEM)
        deployment = install(plane)
        plane.kubectl("apply", "--filename", "-", stdin=json.dumps(FLOW_SCHEMA))
        for number in range(NAMESPACES):
            plane.kubectl("create", "namespace", f"team-{number}")
        plane.wait_for_crds("fastgendeployments.fastgen.dev")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        operator = Operator(plane, container, log)
        with fake_nodes(plane, -(-figures.pods * 2 // PODS_PER_NODE), POD_ADDRESSES):
            say(f"creating {figures.deployments} FastGenDeployments")
            create(plane, deployments(options.deployments, options.replicas))
            try:
                measure(plane, operator, figures, options.steady_seconds)
            finally:
                operator.stop()
    prober = operator.prober
    figures.probes, figures.probes_failed, figures.kills = prober.sent, prober.failed, tuple(prober.kills)
    figures.slowest_probe_seconds = prober.slowest_seconds
    text = json.dumps(asdict(figures), indent=2)
    print(text)
    print(table(figures))
    if options.json:
        options.json.write_text(text + "\n")
    if figures.kills:
        raise SystemExit("the kubelet would have killed the operator: see kills")


if __name__ == "__main__":
    main()
