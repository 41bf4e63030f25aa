"""Conditions of resources that the cluster cannot run."""

from __future__ import annotations

import httpx
import pytest

from support.deployments import ServedNamespace, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

NO_CUDA = "or use --device cpu"  # end of the engine's error without a GPU


def test_too_many_gpus_give_insufficient_gpu_and_affect_no_other_resource(namespace: ServedNamespace) -> None:
    namespace.apply(manifest("fits"))
    greedy = {"gpu": {"count": 1, "resourceName": "nvidia.com/mig-7g.80gb"}, "limits": {"memory": "2Gi"}}
    namespace.apply(manifest("greedy", engine={"device": "cuda", "maxModelLength": 2048}, resources=greedy))
    scheduled = namespace.wait_condition("PodsScheduled", "False", name="greedy")
    assert scheduled["reason"] == "InsufficientGPU"
    assert "Insufficient nvidia.com/mig-7g.80gb" in scheduled["message"], "the scheduler's message is missing"
    ready = namespace.condition("Ready", "greedy")
    assert (ready["status"], ready["reason"]) == ("False", "InsufficientGPU")
    namespace.wait_condition("Ready", "True", name="fits")
    assert namespace.condition("PodsScheduled", "fits")["status"] == "True"
    with namespace.url("fits") as url:
        assert eventually(lambda: httpx.get(f"{url}/ready").status_code == 200, within=30, what="fits")
    patch = '{"spec": {"resources": {"gpu": {"resourceName": "nvidia.com/gpu"}}}}'
    namespace.kubectl("patch", "fgd", "greedy", "--type", "merge", "--patch", patch)
    namespace.wait_condition("PodsScheduled", "True", name="greedy")
    # The node only advertises a GPU. The engine finds none, and does not fall back to the CPU.

    def reports_no_gpu() -> bool:
        return NO_CUDA in str(namespace.condition("Ready", "greedy")["message"])

    eventually(reports_no_gpu, within=90, what="the engine's error")
    patch = '{"spec": {"engine": {"device": "cpu"}, "resources": {"gpu": {"count": 0}}}}'
    namespace.kubectl("patch", "fgd", "greedy", "--type", "merge", "--patch", patch)
    namespace.wait_condition("Ready", "True", name="greedy")


def test_an_invalid_spec_is_rejected_at_admission_with_the_reason(namespace: ServedNamespace) -> None:
    budget = manifest("bad", engine={"device": "cpu", "tokenBudget": 16, "maxSequences": 32})
    with pytest.raises(Exception, match=r"tokenBudget.*maxSequences|maxSequences.*tokenBudget"):
        namespace.apply(budget)
    rollout = manifest("bad", rollout={"maxSurge": 0, "maxUnavailable": 0})
    with pytest.raises(Exception, match="maxSurge"):
        namespace.apply(rollout)
    with pytest.raises(Exception, match=r"spec\.model\.source"):
        namespace.apply(manifest("bad", model={"source": "smollm2.gguf"}))
    assert namespace.items("fgd") == []


def test_a_missing_model_is_reported_in_the_ready_condition(namespace: ServedNamespace) -> None:
    namespace.apply(manifest("lost", model={"source": "file:///models/no-such-model.gguf"}))

    def reports_model() -> Object | None:
        ready = namespace.condition("Ready", "lost")
        return ready if "no-such-model.gguf" in ready["message"] else None

    ready = eventually(reports_model, within=90, what="the engine's error in the Ready condition")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", "BadConfiguration")
    assert "no such file or directory" in ready["message"]
