"""New revisions on a real node, behind the real gateway: a slow one and one that crashes are rolled back by themselves.

Clients stream all the time. Only requests that a canary has got may fail.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from cluster import pod_faults
from support.deployments import MODEL, ServedNamespace, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

# The requests are small, so that the pods of both revisions fit on the node.
RESOURCES = {"requests": {"cpu": "100m"}, "limits": {"memory": "2Gi", "cpu": "600m"}}
# Far above what a busy node measures: only the comparison of the first trial is tested by its numbers.
PATIENT = {"compareWithStable": False}


@dataclass
class Clients:
    """Streams of completions through the gateway, one after another in each thread.

    Attributes:
        pods: the pod of each stream that has ended well.
        failures: the pod of each other one, empty if none answered, and why.
    """

    url: str
    pods: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def send(self, stop: threading.Event) -> None:
        body = {"model": "canaried", "prompt": "The capital of France is", "max_tokens": 24, "stream": True}
        while not stop.is_set():
            pod = ""
            try:
                with httpx.stream(
                    "POST", f"{self.url}/v1/completions", json=body, headers={"x-fastgen-explain": "1"}, timeout=900
                ) as response:
                    pod = response.headers.get("x-fastgen-pod", "")
                    events = [line for line in response.iter_lines() if line]
                    if response.status_code != 200 or events[-1] != "data: [DONE]":
                        raise RuntimeError(f"{response.status_code}: {events[-1:]}")
                self.pods.append(pod)
            except (httpx.HTTPError, RuntimeError, IndexError) as error:
                self.failures.append((pod, f"{type(error).__name__}: {error}"))

    def flow(self, number: int) -> None:
        """Wait until so many more streams have ended."""
        wanted = len(self.pods) + number
        eventually(lambda: len(self.pods) >= wanted, within=300, what=f"{number} streams", every=0.5)


@contextmanager
def clients(url: str, number: int) -> Iterator[Clients]:
    made, stop = Clients(url), threading.Event()
    threads = [threading.Thread(target=made.send, args=(stop,)) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        stop.set()
        for thread in threads:
            thread.join(910)


def change(namespace: ServedNamespace, budget: int, analysis: dict[str, Any]) -> None:
    """Apply another revision."""
    spec = {"engine": {"tokenBudget": budget}, "rollout": {"canary": {"analysis": analysis}}}
    namespace.kubectl("patch", "fgd", "canaried", "--type", "merge", "--patch", json.dumps({"spec": spec}))


def canary(namespace: ServedNamespace) -> dict[str, Any]:
    found: dict[str, Any] = namespace.get("fgd", "canaried")["status"].get("canary", {})
    return found


def serving_canary(namespace: ServedNamespace, seen: Clients) -> Object:
    """Wait until the canary has requests, and return its pod."""
    eventually(lambda: canary(namespace).get("percent") == 50, within=300, what="a canary", every=0.5)
    (pod,) = namespace.pods("canaried_canary")
    name = pod["metadata"]["name"]
    eventually(lambda: name in seen.pods, within=120, what="a stream of the canary", every=0.5)
    return pod


def wait_rolled_back(namespace: ServedNamespace, reason: str) -> None:
    eventually(lambda: canary(namespace).get("outcome") == "RolledBack", within=300, what="a rollback", every=0.5)
    assert canary(namespace)["reason"] == reason, canary(namespace)
    namespace.wait_condition("Progressing", "False", reason, name="canaried")


def test_bad_revisions_are_rolled_back_and_a_good_one_replaces_the_pods(
    namespace: ServedNamespace, gateway: str
) -> None:
    steps = [{"percent": 50, "minutes": 1}]
    resource = manifest(
        "canaried",
        model={"source": MODEL, "servedName": "canaried"},
        gateway={"expose": True},
        rollout={"maxSurge": 1, "maxUnavailable": 0, "canary": {"steps": steps, "analysis": PATIENT}},
        resources=RESOURCES,
        drainSeconds=300,
    )
    namespace.apply(resource)
    namespace.wait_condition("Ready", "True", "AllReplicasReady", name="canaried")
    (first,) = [pod["metadata"]["name"] for pod in namespace.pods("canaried")]
    with clients(gateway, 2) as seen:
        seen.flow(3)

        change(namespace, 96, {"compareWithStable": True})
        slow = serving_canary(namespace, seen)
        pod_faults.limit_cpus(slow, 0.1)
        wait_rolled_back(namespace, "CanaryTooSlow")
        eventually(lambda: not namespace.pods("canaried_canary"), within=60, what="no pod of the canary")
        seen.flow(3)
        assert seen.failures == [], "a slow revision fails no request"

        change(namespace, 80, PATIENT)
        crashing = serving_canary(namespace, seen)
        pod_faults.kill(crashing, "fastgen.engine.process")
        wait_rolled_back(namespace, "CanaryCrashed")
        seen.flow(3)
        failed = {pod for pod, _ in seen.failures}
        assert failed <= {crashing["metadata"]["name"]}, "only requests of the canary's share"
        assert [pod["metadata"]["name"] for pod in namespace.pods("canaried")] == [first], "no pod was replaced"

        number = len(seen.failures)
        change(namespace, 64, PATIENT)
        serving_canary(namespace, seen)

        def promoted() -> bool:
            names = [pod["metadata"]["name"] for pod in namespace.pods("canaried")]
            ready = namespace.condition("Ready", "canaried")
            return canary(namespace) == {} and ready.get("status") == "True" and first not in names

        eventually(promoted, within=500, what="the new revision in all pods", every=0.5)
        eventually(lambda: not namespace.pods("canaried_canary"), within=60, what="no pod of the canary")
        seen.flow(3)
        assert len(seen.failures) == number, seen.failures[number:]
