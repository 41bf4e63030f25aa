"""The engine's real image, built from the Dockerfile, serves in a pod, and has what the GPU path needs."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from cluster.bed import Bed
from support.deployments import ServedNamespace, chat, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.image]

CHECKS = Path(__file__).with_name("gpu_path_in_image.py")


def test_a_deployment_runs_from_the_real_engine_image(
    bed: Bed, engine_image: Future[str], namespace: ServedNamespace
) -> None:
    image = engine_image.result()
    spec = {"device": "cpu", "image": image, "tokenBudget": 128, "maxModelLength": 2048}
    namespace.apply(manifest("chat", engine=spec))
    namespace.wait_condition("Ready", "True")
    container = namespace.pods("chat")[0]["spec"]["containers"][0]
    assert container["image"] == image != bed.engine_image
    with namespace.url("chat") as url:
        assert "Berlin" in eventually(lambda: chat(url), within=30, what="a response")


def test_the_image_has_what_the_gpu_path_needs_and_without_a_gpu_the_engine_ends_with_exit_code_2(
    engine_image: Future[str], namespace: ServedNamespace
) -> None:
    spec = {"device": "cuda", "image": engine_image.result()}
    resources = {"gpu": {"count": 1}, "limits": {"memory": "3Gi"}}
    namespace.apply(manifest("chat", engine=spec, resources=resources))
    ready = namespace.wait_condition("Ready", "False", "BadConfiguration")
    assert "no NVIDIA driver is visible" in ready["message"]
    (pod,) = namespace.pods("chat")
    (status,) = pod["status"]["containerStatuses"]
    ended = status["state"].get("terminated") or status["lastState"]["terminated"]
    assert ended["exitCode"] == 2
    checks = checking(namespace.get("deployment", "chat")["spec"]["template"]["spec"])
    namespace.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "checks"}, "spec": checks})

    def phase() -> str | None:
        found: str = namespace.get("pod", "checks")["status"]["phase"]
        return found if found in ("Succeeded", "Failed") else None

    result = eventually(phase, within=300, what="the end of the checks")
    assert result == "Succeeded", namespace.kubectl("logs", "checks")


def checking(spec: Object) -> Object:
    """Return the specification of a pod that runs CHECKS as the engine's pod runs, but without a GPU and a network."""
    (engine,) = spec["containers"]
    kept = {name: engine[name] for name in ("name", "image", "env", "securityContext", "volumeMounts")}
    limits = {name: limit for name, limit in engine["resources"]["limits"].items() if name != "nvidia.com/gpu"}
    container = {**kept, "command": ["python", "-c", CHECKS.read_text()], "resources": {"limits": limits}}
    return {
        **spec,
        "containers": [container],
        "restartPolicy": "Never",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["192.0.2.1"], "options": [{"name": "timeout", "value": "1"}]},
    }
