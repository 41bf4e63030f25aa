"""Autoscaling end to end: a burst of requests scales a small model up, and its end scales it down."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cluster.bed import Bed
from cluster.demo import SYSTEM
from support.deployments import ServedNamespace, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# The chart's default.
SCRAPE_SECONDS = 5
# More requests than one replica can serve while a pod starts.
BURST = 20


def ask(url: str, number: int) -> int:
    """Send a unique prompt of about 800 tokens and return the HTTP status."""
    words = random.Random(number)
    prompt = " ".join(str(words.randint(1000, 9999)) for _ in range(160))
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300).status_code


def scaling(namespace: ServedNamespace) -> Object:
    found: Object = namespace.get("fgd", "chat")["status"].get("autoscaling", {})
    return found


def operator_metrics(bed: Bed) -> str:
    pod = bed.kubectl("-n", SYSTEM, "get", "pods", "--output", "jsonpath={.items[0].metadata.name}")
    return bed.kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{pod}:8080/proxy/metrics")


def test_a_burst_adds_a_replica_within_two_scrapes_and_its_end_removes_it(bed: Bed, namespace: ServedNamespace) -> None:
    autoscaling = {
        "maxReplicas": 2,
        "targets": {"timeToFirstTokenMilliseconds": 2000},
        "scaleDown": {"stabilizationSeconds": 10},
    }
    namespace.apply(manifest("chat", autoscaling=autoscaling, drainSeconds=60))
    namespace.wait_condition("Ready", "True")
    with namespace.url("chat") as url, ThreadPoolExecutor(BURST) as clients:
        eventually(lambda: ask(url, -1) == 200, within=60, what="a response")
        eventually(lambda: "capacity" in namespace.get("fgd", "chat")["status"], within=60, what="a known capacity")
        assert namespace.wait_condition("ScalingActive", "True")["reason"] == "Active"
        assert scaling(namespace)["desiredReplicas"] == 1

        began = time.monotonic()
        answers = [clients.submit(ask, url, number) for number in range(BURST)]
        # One second for the burst to arrive, two for the reconcile and this poll.
        limit = 2 * SCRAPE_SECONDS + 3
        eventually(lambda: scaling(namespace)["desiredReplicas"] == 2, within=limit, what="a second replica", every=0.2)
        print(f"second replica requested after {time.monotonic() - began:.1f} s")
        told = scaling(namespace)
        assert told["reason"] in ("BacklogTooLong", "DemandJumped")
        assert "1 replica" in told["message"]
        assert namespace.get("deployment", "chat")["spec"]["replicas"] == 2
        assert {answer.result() for answer in answers} == {200}, "requests were lost"

    eventually(lambda: scaling(namespace)["desiredReplicas"] == 1, within=150, what="one replica again", every=1)
    told = scaling(namespace)
    assert [step["toReplicas"] for step in told["history"]] == [1, 2]
    assert told["reason"] == "DemandFell"
    eventually(lambda: len(namespace.pods("chat")) == 1, within=60, what="one pod")
    events = {event["reason"]: event["message"] for event in namespace.items("events")}
    assert events["ScaledUp"].startswith("from 1 to 2 replicas: ")
    assert events["ScaledDown"].startswith("from 2 to 1 replicas: ")
    metrics = operator_metrics(bed)
    assert (
        f'fastgen_operator_scaling_decisions_total{{name="chat",namespace="{namespace.name}",reason="DemandFell"}} 1.0'
        in (metrics)
    )
