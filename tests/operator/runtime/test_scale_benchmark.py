"""The scale benchmark leaves nothing behind, and its simulated engines load the fleets as it says."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from benchmarks.simulated_engines import MODEL, UTILIZATION, Exposition

from fastgen.server.serving.metrics import Metrics
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.recommend import State, recommend
from fastgen_operator.autoscale.sample import Fleet
from fastgen_operator.autoscale.scrape.exposition import QUERY, parse_sample
from support.waiting import eventually

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# Of the ranges for documentation, so that a benchmark may run at the same time.
PROGRAM = """
import subprocess, sys
from pod_network import answering_at
with answering_at(["sleep", "100"], "203.0.113.0/24", "192.0.2.8/30") as process:
    print(process.pid, subprocess.run(["ip", "route", "get", "203.0.113.7"], capture_output=True).stdout, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="network devices need root")
def test_nothing_is_left_of_a_killed_benchmark() -> None:
    paths = os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent / "tests")))
    command = [sys.executable, "-c", PROGRAM]
    for _ in range(2):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        ) as benchmark:
            assert benchmark.stdout is not None
            pid, _, route = benchmark.stdout.readline().partition(" ")
            device = f"fgen{benchmark.pid}"
            assert device in route, "the addresses are not reached"
            benchmark.send_signal(signal.SIGKILL)
        for left in (Path("/proc", pid), Path("/sys/class/net", device)):
            eventually(lambda left=left: not left.exists(), within=10, what=f"the end of {left}", every=0.02)


def test_a_fifth_of_the_resources_has_autoscaling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    made = importlib.import_module("operator_scale").deployments(20, 5)
    assert ["autoscaling" in each["spec"] for each in made].count(True) == 4


def test_the_simulated_load_needs_the_replicas_that_exist() -> None:
    policy, state = Policy(min_replicas=3, max_replicas=10, derives_utilization=True), State()
    engine, pods = Exposition(MODEL, UTILIZATION), [f"pod-{number}" for number in range(5)]
    for now in range(0, 1200, 5):
        sample = parse_sample(engine.text_at(now, ()).decode(), MODEL, float(now))
        fleet = Fleet(replicas=5, ready=frozenset(pods), samples=dict.fromkeys(pods, sample))
        decision, state = recommend(policy, state, fleet, float(now))
        assert decision.replicas == 5, decision


def test_a_simulated_engine_answers_with_the_samples_and_comments_of_a_real_one() -> None:
    names = parse_qs(QUERY)["name[]"]
    real, _ = Metrics(MODEL).expose("text/plain", 1, names)
    simulated = Exposition(MODEL, UTILIZATION).text_at(1.0, names)
    without_values = [
        sorted(line if line.startswith("#") else line.rpartition(" ")[0] for line in text.decode().splitlines())
        for text in (real, simulated)
    ]
    assert without_values[0] == without_values[1]
