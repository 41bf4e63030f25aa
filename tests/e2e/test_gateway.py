"""The chart's gateway on a real node: a model at zero replicas, requests that are held and answered, and zero again.

Envoy is this machine's, in a stand-in image; the picker's image is built.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from support.deployments import MODEL, ServedNamespace, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

HELD = 50
IDLE = 20


def sleeper(name: str) -> Object:
    """Return a FastGenDeployment of the demo model that may have no replica; the gateway knows it by its own name."""
    return manifest(
        name,
        model={"source": MODEL, "servedName": name},
        gateway={"expose": True},
        autoscaling={"minReplicas": 0, "maxReplicas": 1, "idleSeconds": IDLE},
    )


def ask(url: str, model: str) -> tuple[int, str]:
    """Return the status and the text of a short completion."""
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=1200)
    return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text


def models(gateway: str) -> str:
    return httpx.get(f"{gateway}/v1/models", timeout=60).text


def test_requests_held_at_zero_are_answered_and_the_idle_model_goes_back_to_zero(
    namespace: ServedNamespace, gateway: str
) -> None:
    namespace.apply(sleeper("sleepy"))
    namespace.wait_condition("Ready", "True", "ScaledToZero", name="sleepy")
    namespace.wait_condition("Exposed", "True", "ModelRouted", name="sleepy")
    assert namespace.pods("sleepy") == []
    eventually(lambda: "sleepy" in models(gateway), within=30, what="the model in the gateway's list")
    with ThreadPoolExecutor(HELD) as clients:
        answers = list(clients.map(lambda _: ask(gateway, "sleepy"), range(HELD)))
    assert {status for status, _ in answers} == {200}, answers
    assert len({text for _, text in answers}) == 1
    namespace.wait_condition("Ready", "True", "AllReplicasReady", name="sleepy")
    history = namespace.get("fgd", "sleepy")["status"]["autoscaling"]["history"]
    assert [step["reason"] for step in history] == ["RequestsHeld"]

    eventually(lambda: namespace.pods("sleepy") == [], within=180, what="no replica")
    namespace.wait_condition("Ready", "True", "ScaledToZero", name="sleepy")
    history = namespace.get("fgd", "sleepy")["status"]["autoscaling"]["history"]
    assert [step["reason"] for step in history] == ["Idle", "RequestsHeld"]
    status, words = ask(gateway, "nobody")
    assert (status, "sleepy" in models(gateway)) == (404, True), words
