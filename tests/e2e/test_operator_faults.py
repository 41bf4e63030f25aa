"""What tenants, a missing right and a paused leader do to the operator of a real cluster: others are served on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import pod_faults, standin
from cluster.archive import write
from cluster.bed import Bed
from cluster.demo import LEASE, RELEASE, SYSTEM, install
from harness.chart import CLUSTER_NAME
from harness.hostile import create, deep, without_limits
from harness.process import LABEL, SAMPLE
from support.deployments import ServedNamespace, chat, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

OPERATOR = f"deployment/{RELEASE}-operator"
# Answers a scrape with one metric of 10,000 labels, within the most bytes of a response.
HOSTILE = b"""
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = b"fastgen_kv_cache_tokens{" + b",".join(b'a%d="b"' % n for n in range(10_000)) + b"} 1\\n"

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = METRICS if self.path.startswith("/metrics") else b"ok"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def native(bed: Bed) -> None:
    if bed.kind != "native":
        pytest.skip("needs a node on this machine")


def operators(bed: Bed) -> list[Object]:
    """Return the operator's pods that are not being deleted."""
    found = json.loads(bed.kubectl("-n", SYSTEM, "get", "pods", "--output=json"))["items"]
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def restart(bed: Bed) -> None:
    """Replace the operator's pods, and wait until the new ones are ready."""
    bed.kubectl("-n", SYSTEM, "rollout", "restart", OPERATOR)
    bed.kubectl("-n", SYSTEM, "rollout", "status", OPERATOR, "--timeout=600s")


def restarts(bed: Bed) -> int:
    """Return how often containers of the operator have ended."""
    return sum(status["restartCount"] for pod in operators(bed) for status in pod["status"]["containerStatuses"])


def metrics(bed: Bed) -> dict[tuple[str, str], float]:
    """Return the metrics of the only operator, by name and the values of their labels."""
    (pod,) = (each["metadata"]["name"] for each in operators(bed))
    text = bed.kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{pod}:8080/proxy/metrics")
    found = SAMPLE.findall(text)
    return {(name, "/".join(LABEL.findall(labels))): float(value) for name, labels, value in found}


def scale(namespace: ServedNamespace, replicas: int) -> float:
    """Scale the resource `chat`, and return the seconds until all its replicas are ready."""
    began = time.monotonic()
    namespace.kubectl("scale", "fgd/chat", f"--replicas={replicas}")
    namespace.wait_condition("Ready", "True", "AllReplicasReady")
    assert len(namespace.pods("chat")) >= replicas
    return time.monotonic() - began


def test_a_resource_that_is_nested_too_deeply_stops_nothing_also_after_a_restart(
    bed: Bed, namespace: ServedNamespace
) -> None:
    namespace.apply(manifest("chat"))
    namespace.wait_condition("Ready", "True", "AllReplicasReady")
    names = [f"map-{depth}" for depth in (100, 700, 9000)]
    with without_limits(namespace):
        for name in names:
            create(namespace, name, deep(int(name.partition("-")[2])))
        for name in names:
            namespace.wait_condition("Ready", "False", "InvalidSpec", name=name)
        scale(namespace, 2)
        restart(bed)
        scale(namespace, 1)
        assert restarts(bed) == 0
    with namespace.url("chat") as url:
        assert "Berlin" in chat(url)


@contextmanager
def without_right(bed: Bed, plural: str) -> Iterator[None]:
    """Take the right to list and watch a kind from the operator."""
    role = json.loads(bed.kubectl("get", "clusterrole", CLUSTER_NAME, "--output=json"))
    rules = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb not in ("list", "watch")]}
        if plural in rule["resources"]
        else rule
        for rule in role["rules"]
    ]
    try:
        _set_rules(bed, rules)
        yield
    finally:
        _set_rules(bed, role["rules"])


def _set_rules(bed: Bed, rules: list[Object]) -> None:
    bed.kubectl("patch", "clusterrole", CLUSTER_NAME, "--type=merge", f"--patch={json.dumps({'rules': rules})}")


def stale(bed: Bed) -> set[str]:
    return {kind for (name, kind), value in metrics(bed).items() if name == "fastgen_operator_stale" and value}


def test_a_missing_right_makes_one_kind_stale_and_stops_no_other(bed: Bed, namespace: ServedNamespace) -> None:
    with without_right(bed, "poddisruptionbudgets"):
        restart(bed)
        eventually(lambda: stale(bed) == {"poddisruptionbudgets/"}, within=60, what="the stale kind")
        namespace.apply(manifest("chat"))
        namespace.wait_condition("Ready", "True", "AllReplicasReady")
        scale(namespace, 2)
        assert restarts(bed) == 0
    eventually(lambda: stale(bed) == set(), within=120, what="the kind to be read again")


def leader(bed: Bed) -> str:
    """Return the name of the pod that holds the Lease."""
    found = bed.kubectl("-n", SYSTEM, "get", "lease", LEASE, "--output=jsonpath={.spec.holderIdentity}")
    return found.partition("_")[0]


def test_a_leader_paused_beyond_its_lease_writes_nothing_when_it_goes_on(bed: Bed, namespace: ServedNamespace) -> None:
    namespace.apply(manifest("chat"))
    namespace.wait_condition("Ready", "True", "AllReplicasReady")
    install(bed, RELEASE, "--set=operator.replicas=2")
    try:
        eventually(lambda: len(operators(bed)) == 2 and leader(bed), within=60, what="two operators and a leader")
        (first,) = (pod for pod in operators(bed) if pod["metadata"]["name"] == leader(bed))
        name = first["metadata"]["name"]
        namespace.kubectl("scale", "fgd/chat", "--replicas=3")
        with pod_faults.paused(first, "fastgen-operator"):
            eventually(lambda: leader(bed) not in ("", name), within=60, what="another leader", every=0.5)
            namespace.kubectl("scale", "fgd/chat", "--replicas=2")
            namespace.wait_condition("Ready", "True", "AllReplicasReady")
            second, settled = leader(bed), namespace.get("deployment", "chat")["metadata"]["generation"]
            before = restarts(bed)
        # Its process ends once it knows that it has lost the Lease; what it wrote until then would be stored.
        eventually(lambda: restarts(bed) > before, within=60, what="the end of the paused process")
        assert leader(bed) == second != name
        found = namespace.get("deployment", "chat")
        assert (found["metadata"]["generation"], found["spec"]["replicas"]) == (settled, 2)
        scale(namespace, 1)
    finally:
        install(bed)


def test_replicas_with_hostile_metrics_delay_no_autoscaling_of_others(
    bed: Bed, namespace: ServedNamespace, tmp_path: Path
) -> None:
    own = standin.image()
    hostile = replace(
        own,
        name="docker.io/library/hostile:test",
        entrypoint=[own.entrypoint[0], "/hostile.py"],
        files={**own.files, "/hostile.py": HOSTILE},
    )
    write(hostile, tmp_path / "hostile.tar")
    bed.load_image(hostile.name, tmp_path / "hostile.tar")
    engine = {"device": "cpu", "image": hostile.name}
    namespace.apply(manifest("evil", engine=engine, autoscaling={"minReplicas": 4, "maxReplicas": 4}))
    autoscaling = {"minReplicas": 1, "maxReplicas": 2}
    namespace.apply(manifest("chat", autoscaling=autoscaling))
    namespace.wait_condition("Ready", "True", name="evil")
    namespace.wait_condition("Ready", "True")
    failed = ("fastgen_operator_scrape_failures_total", "TooLarge")
    eventually(lambda: metrics(bed).get(failed, 0) >= 20, within=120, what="scrapes of the hostile replicas")
    namespace.wait_condition("ScalingActive", "True", "Active")
    namespace.patch("fgd/chat", {"spec": {"autoscaling": {"minReplicas": 2}}})

    def decided() -> bool:
        return bool(namespace.get("fgd", "chat")["status"]["autoscaling"]["desiredReplicas"] == 2)

    eventually(decided, within=25, what="a decision")
    namespace.wait_condition("Ready", "True")
    namespace.wait_condition("ScalingActive", "True", "Active")
    assert restarts(bed) == 0
