"""Autoscaling end to end: a burst of requests scales a small model up, and its end scales it down.

In between one replica is slow, and another one never becomes ready.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from threading import Event

import httpx
import pytest

from cluster import pod_faults
from cluster.bed import Bed
from cluster.demo import SYSTEM
from fastgen_operator.plugin import main as plugin
from support.deployments import ServedNamespace, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

# The chart's default.
SCRAPE_SECONDS = 5
# More requests than two replicas can serve while their pods start.
BURST = 40
# Clients that send a short prompt each second afterwards, so that the replicas' speeds can be measured.
CLIENTS = 2
# CPUs of the slow replica. The others share the rest of the machine, which may be one half of a CPU beside other tests.
SLOW_CPUS = 0.12


def ask(url: str, number: int, words: int = 160) -> int:
    """Send a unique prompt of about five tokens for each word, and return the HTTP status."""
    source = random.Random(number)
    prompt = " ".join(str(source.randint(1000, 9999)) for _ in range(words))
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=1500).status_code


@contextmanager
def load(url: str) -> Iterator[None]:
    """Send prompts from a few clients; none of them may fail.

    A prompt fills a whole step. A limit on CPUs is one over each 100 ms: a fast processor ends short steps within it.
    """
    over = Event()

    def client(number: int) -> set[int]:
        answers = set()
        while not over.wait(1):
            number += CLIENTS
            answers.add(ask(url, 1_000_000 + number, words=40))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            over.set()
        assert [one.result() for one in clients] == [{200}] * CLIENTS, "requests were lost"


def scaling(namespace: ServedNamespace) -> Object:
    found: Object = namespace.get("fgd", "chat")["status"].get("autoscaling", {})
    return found


def supply(namespace: ServedNamespace) -> dict[str, tuple[str, str]]:
    """Return state and message of each pod that does not serve."""
    pods = namespace.get("fgd", "chat")["status"]["supply"]["pods"]
    return {pod["name"]: (pod["state"], pod["message"]) for pod in pods}


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def new_replica(namespace: ServedNamespace, known: set[str]) -> Object | None:
    """Return a ready pod that is not known; None if there is none."""
    pods = [pod for pod in namespace.pods("chat") if pod["metadata"]["name"] not in known and is_ready(pod)]
    return pods[0] if pods else None


def operator_metrics(bed: Bed) -> str:
    pod = bed.kubectl("-n", SYSTEM, "get", "pods", "--output", "jsonpath={.items[0].metadata.name}")
    return bed.kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{pod}:8080/proxy/metrics")


def test_a_burst_scales_from_one_to_three_and_back_with_a_straggler_and_a_replica_that_never_starts(
    bed: Bed, namespace: ServedNamespace
) -> None:
    if bed.kind != "native":
        pytest.skip("replicas are slowed and stopped through cgroups, which needs a native node")
    scale_down = {"stabilizationSeconds": 10, "maxStepPercent": 100, "selectPolicy": "Disabled"}
    autoscaling = {"maxReplicas": 3, "targets": {"timeToFirstTokenMilliseconds": 2000}, "scaleDown": scale_down}
    namespace.apply(manifest("chat", autoscaling=autoscaling))
    namespace.wait_condition("Ready", "True")
    (first,) = (pod["metadata"]["name"] for pod in namespace.pods("chat"))
    with namespace.url("chat") as url:
        # A long prompt alone may need more replicas on a slow machine.
        eventually(lambda: ask(url, -1, words=20) == 200, within=60, what="a response")
        eventually(lambda: "capacity" in namespace.get("fgd", "chat")["status"], within=60, what="a known capacity")
        assert namespace.wait_condition("ScalingActive", "True")["reason"] == "Active"
        assert scaling(namespace)["desiredReplicas"] == 1

        with ThreadPoolExecutor(BURST + 1) as clients:
            stopping = clients.submit(pod_faults.stop_next, "fastgen serve", 600)
            began = time.monotonic()
            answers = [clients.submit(ask, url, number) for number in range(BURST)]
            # One second for the burst to arrive, two for the reconcile and this poll.
            limit = 2 * SCRAPE_SECONDS + 3
            eventually(lambda: scaling(namespace)["desiredReplicas"] > 1, within=limit, what="more", every=0.2)
            print(f"more replicas requested after {time.monotonic() - began:.1f} s")
            told = scaling(namespace)
            assert told["history"][-1]["reason"] in ("BacklogTooLong", "DemandJumped")
            assert "1 replica" in told["history"][-1]["message"]
            uid = stopping.result()
            (stuck,) = (pod["metadata"]["name"] for pod in namespace.pods("chat") if pod["metadata"]["uid"] == uid)
            assert stuck != first
            eventually(lambda: scaling(namespace)["desiredReplicas"] == 3, within=120, what="three replicas", every=0.5)
            assert namespace.get("deployment", "chat")["spec"]["replicas"] == 3
            slow = eventually(lambda: new_replica(namespace, {first, stuck}), within=120, what="a second replica")
            assert slow is not None
            pod_faults.limit_cpus(slow, SLOW_CPUS)
            straggler = slow["metadata"]["name"]
            print(f"{straggler} is slowed after {time.monotonic() - began:.1f} s")
            with load(url):
                uneven = namespace.wait_condition("ReplicasUniform", "False", "Stragglers")
                print(f"the straggler is known after {time.monotonic() - began:.1f} s")
                assert straggler in uneven["message"]
                assert first not in uneven["message"]
                assert straggler in namespace.get("fgd", "chat")["status"]["stragglers"]
                eventually(
                    lambda: supply(namespace)[stuck][0] == "Failing", within=120, what="the stuck replica", every=0.5
                )
                assert "its engine is not ready after" in supply(namespace)[stuck][1]
                metrics = operator_metrics(bed)
                assert f'fastgen_operator_straggler_speed_ratio{{name="chat",namespace="{namespace.name}"' in metrics
                assert scaling(namespace)["desiredReplicas"] == 3, "scaling down is disabled"
            assert {answer.result() for answer in answers} == {200}, "requests were lost"

    namespace.patch("fgd/chat", {"spec": {"autoscaling": {"scaleDown": {"selectPolicy": "Max"}}}})
    eventually(lambda: scaling(namespace)["desiredReplicas"] == 1, within=240, what="one replica again", every=1)
    print(f"one replica requested after {time.monotonic() - began:.1f} s")
    told = scaling(namespace)
    steps = [(step["fromReplicas"], step["toReplicas"]) for step in reversed(told["history"])]
    assert (steps[0][0], max(after for _, after in steps), steps[-1][1]) == (1, 3, 1)
    assert told["reason"] == "DemandFell"
    assert told["message"].startswith("1 replica: ")

    def only_one_that_serves() -> bool:
        (pod,) = namespace.pods("chat")
        return is_ready(pod) and pod["metadata"]["name"] != stuck

    # Unready pods are removed first, so the stuck one does not stay in place of one that serves.
    eventually(only_one_that_serves, within=60, what="one pod that serves")
    namespace.wait_condition("Ready", "True", "AllReplicasReady")
    events = [(event["reason"], event["message"]) for event in namespace.items("events")]
    assert any(reason == "ScaledUp" and message.startswith("from 1 to ") for reason, message in events)
    assert any(reason == "ScaledDown" and " to 1 replica: " in message for reason, message in events)
    fell = f'fastgen_operator_scaling_decisions_total{{name="chat",namespace="{namespace.name}",reason="DemandFell"}}'
    assert fell in operator_metrics(bed)
    with redirect_stdout(StringIO()) as explained:
        flags = ("-n", namespace.name, "--kubeconfig", str(bed.kubeconfig), "--operator-namespace", SYSTEM)
        assert plugin.main(["explain-scaling", "chat", "--all", *flags]) == 0
    assert "1 -> " in explained.getvalue()
    assert "DemandFell" in explained.getvalue()
