"""`status.model` on a real API server: what a ready engine says that it serves."""

from __future__ import annotations

from typing import Any

import pytest

from harness.engines import FakeEngine
from harness.loopback import LOOPBACK
from harness.process import OperatorProcess
from harness.space import Space, resource, running
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]


def serve(space: Space, pod: Object, engine: FakeEngine) -> None:
    """Let the pod be ready, with the engine at its address."""
    status = {**running(ready=True), "podIP": engine.address, "podIPs": [{"ip": engine.address}]}
    space.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")


def wait_model(space: Space, expected: dict[str, Any]) -> None:
    eventually(
        lambda: space.get("fgd", "chat").get("status", {}).get("model") == expected, within=30, what=f"{expected}"
    )


def test_the_status_has_the_model_of_the_newest_revision(space: Space, own_operator: OperatorProcess) -> None:
    first, second = (FakeEngine(next(LOOPBACK)).start() for _ in range(2))
    second.described = {"family": "gpt_oss", "format": "safetensors MXFP4", "parameters": 2, "bytes": 0}
    try:
        space.apply(resource())
        (pod,) = space.wait_pods(1)
        assert "model" not in space.get("fgd", "chat").get("status", {}), "no engine was ready"
        serve(space, pod, first)
        described = {
            **{"family": "llama", "format": "GGUF Q4_1", "parameters": 134_515_008, "bytes": 98_765_432},
            "maxModelLength": 2048,
        }
        wait_model(space, described)
        space.patch("fgd/chat", {"spec": {"engine": {"tokenBudget": 64}}})
        name = pod["metadata"]["name"]

        def newer() -> Object | None:
            return next((each for each in space.pods() if each["metadata"]["name"] != name), None)

        pod = eventually(newer, within=30, what="the pod of the new revision")
        assert space.get("fgd", "chat")["status"]["model"] == described, "until the new revision is ready"
        serve(space, pod, second)
        wait_model(space, {"family": "gpt_oss", "format": "safetensors MXFP4", "parameters": 2})
        first.close()
        second.close()
        own_operator.restart()
        space.patch("fgd/chat", {"spec": {"drainSeconds": 7}})
        eventually(
            lambda: space.get("fgd", "chat")["status"]["observedGeneration"] == 3, within=30, what="the new operator"
        )
        assert space.get("fgd", "chat")["status"]["model"]["family"] == "gpt_oss", "a restart forgets nothing"
    finally:
        first.close()
        second.close()
