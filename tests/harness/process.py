"""The real operator as a child process that tests start, stop and kill."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx

from cluster.controlplane import free_ports
from support.forking import Forked, fork_server
from support.waiting import PATIENCE, eventually

PROGRAM = "harness.operator_program"
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'\w+="((?:[^"\\]|\\.)*)"')

# NetworkPolicy peer of the gateway's pods, as in the chart.
GATEWAY_PODS = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "fastgen-gateway"}}}
RESYNC_SECONDS = 0.5
SCRAPE_SECONDS = 0.5


@cache
def client() -> httpx.Client:
    """Return an HTTP client for all tests: each new one reads the system's certificates, which takes 30 ms."""
    return httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class OperatorProcess:
    """One operator against one API server; `log` collects the output of all its processes.

    The processes are forks of one that has imported the operator; `test_main.py` starts it from its command line.

    Attributes:
        ahead: a file with the seconds by which the clock of the operator's machine is ahead.
    """

    kubeconfig: Path
    log: Path
    arguments: Sequence[str] = ()
    election: Sequence[str] = ("--no-leader-elect",)
    metrics_port: int = 0
    health_port: int = 0
    decisions_port: int = 0
    ahead: Path | None = None
    _process: Forked | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        self.launch()
        try:
            eventually(self.is_ready, within=30, what="a ready operator", every=0.1)
        except TimeoutError as error:
            error.add_note(self.log.read_text()[-20_000:])
            raise

    def launch(self) -> None:
        """Start the process."""
        self.metrics_port, self.health_port, self.decisions_port = free_ports(3)
        arguments = [
            *("--engine-image", "engine:test", "--bind-address", "127.0.0.1", "--verbose"),
            *("--metrics-port", str(self.metrics_port), "--health-port", str(self.health_port)),
            *("--decisions-port", str(self.decisions_port)),
            *("--scrape-seconds", str(SCRAPE_SECONDS)),
            *("--resync-seconds", str(RESYNC_SECONDS), "--retry-seconds", "0.2", "--retry-limit-seconds", "1"),
            *("--relist-seconds", "5"),
            *("--neighbours", json.dumps({"gateway": [GATEWAY_PODS]})),
            *self.election,
            *self.arguments,
        ]
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "CLOCK_AHEAD": str(self.ahead or "")}
        self._process = fork_server(PROGRAM).start(arguments, self.log, environment)

    def kill(self) -> None:
        """Kill the process, as a crash of its node would."""
        process = self._running()
        process.kill()
        process.wait()
        self._process = None

    def pause(self) -> None:
        """Suspend the process, as when its machine swaps or is migrated."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process after `pause`."""
        self._running().send_signal(signal.SIGCONT)

    def ending(self, within: float) -> int:
        """Wait until the process exits by itself, and return its exit status."""
        status = self._running().wait(within)
        self._process = None
        return status

    def peak_memory(self) -> int:
        """Return the most memory that the process has used, bytes."""
        status = Path(f"/proc/{self._running().pid}/status").read_text()
        (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return int(peak) << 10

    def failed_reconciles(self, namespace: str) -> list[str]:
        """Return the log lines of failed reconciles in a namespace. The metric counts those of all tests together."""
        failed = re.compile(rf"(WARNING|ERROR) fastgen_operator\.runtime\.controller: {re.escape(namespace)}/")
        return [line for line in self.log.read_text().splitlines() if failed.search(line)]

    def leads(self) -> bool:
        """Return whether the process reports that it leads."""
        return self.metrics()["fastgen_operator_leader", ""] == 1

    def abandon(self) -> None:
        """Kill the process if it runs."""
        if self._process is not None:
            self.kill()

    def stop(self) -> int:
        """Stop the process as the kubelet would, if it runs; return the exit status."""
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(20 * PATIENCE)
        finally:
            self._process.kill()
            self._process = None

    def restart(self) -> None:
        """Stop the process and start it again."""
        self.stop()
        self.start()

    def is_healthy(self) -> bool:
        """Return whether the liveness probe passes; RuntimeError if the process has exited."""
        return self.probe("healthz").status_code == 200

    def is_ready(self) -> bool:
        """Return whether the readiness probe passes; RuntimeError if the process has exited."""
        return self.probe("readyz").status_code == 200

    def probe(self, path: str) -> httpx.Response:
        """Return a probe's response; RuntimeError if the process has exited."""
        return self._get(self.health_port, path)

    def metrics(self) -> dict[tuple[str, str], float]:
        """Return the values by sample name and label values, joined by slashes; RuntimeError as `probe`."""
        text = self._get(self.metrics_port, "metrics").text
        return {(name, "/".join(LABEL.findall(labels))): float(value) for name, labels, value in SAMPLE.findall(text)}

    def writes(self) -> dict[str, float]:
        """Return the writes by kind since the start."""
        return {
            kind: count for (name, kind), count in self.metrics().items() if name == "fastgen_operator_writes_total"
        }

    def reconciles(self) -> float:
        """Return the number of reconciles since the start, with those skipped."""
        metrics = self.metrics()
        names = ("reconcile_seconds_count", "skipped_reconciles_total")
        return sum(metrics[f"fastgen_operator_{name}", ""] for name in names)

    def let_resyncs_pass(self, count: int) -> None:
        """Return after at least so many reconciles per resource without an event."""
        resources = max(1, sum(key[0] == "fastgen_operator_desired_replicas" for key in self.metrics()))
        target = self.reconciles() + count * resources
        eventually(lambda: self.reconciles() >= target, within=30, what=f"{count} resyncs")

    def _get(self, port: int, path: str) -> httpx.Response:
        process = self._running()
        if process.poll() is not None:
            raise RuntimeError(f"the operator ended with {process.returncode}: {self.log.read_text()[-3000:]}")
        return client().get(f"http://127.0.0.1:{port}/{path}")

    def _running(self) -> Forked:
        assert self._process is not None, "the operator is not started"
        return self._process
