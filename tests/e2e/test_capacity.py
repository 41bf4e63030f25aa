"""What a deployment says when the cluster cannot hold it."""

from __future__ import annotations

import httpx
import pytest

from support.deployments import ServedNamespace, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NO_CUDA = "or use --device cpu"  # the end of what the engine says where it finds no GPU


def test_more_gpus_than_there_are_shows_insufficient_gpu_and_nothing_else_breaks(namespace: ServedNamespace) -> None:
    namespace.apply(manifest("fits"))
    greedy = {"gpu": {"count": 64}, "limits": {"memory": "2Gi"}}
    namespace.apply(manifest("greedy", engine={"device": "cuda", "maxModelLength": 2048}, resources=greedy))
    scheduled = namespace.wait_condition("PodsScheduled", "False", name="greedy")
    assert scheduled["reason"] == "InsufficientGPU"
    assert "Insufficient nvidia.com/gpu" in scheduled["message"], "the scheduler's own words are missing"
    ready = namespace.condition("Ready", "greedy")
    assert (ready["status"], ready["reason"]) == ("False", "InsufficientGPU")
    namespace.wait_condition("Ready", "True", name="fits")
    assert namespace.condition("PodsScheduled", "fits")["status"] == "True"
    with namespace.url("fits") as url:
        assert eventually(lambda: httpx.get(f"{url}/ready").status_code == 200, within=30, what="fits")
    patch = '{"spec": {"resources": {"gpu": {"count": 1}}}}'
    namespace.kubectl("patch", "fgd", "greedy", "--type", "merge", "--patch", patch)
    namespace.wait_condition("PodsScheduled", "True", name="greedy")
    # The node's GPU is only a number: the engine starts beside it, finds none, and does not fall back to the CPU.

    def is_told() -> bool:
        return NO_CUDA in str(namespace.condition("Ready", "greedy")["message"])

    eventually(is_told, within=90, what="the engine's words")
    patch = '{"spec": {"engine": {"device": "cpu"}, "resources": {"gpu": {"count": 0}}}}'
    namespace.kubectl("patch", "fgd", "greedy", "--type", "merge", "--patch", patch)
    namespace.wait_condition("Ready", "True", name="greedy")


def test_a_nonsense_spec_is_rejected_by_the_api_server_with_the_reason(namespace: ServedNamespace) -> None:
    budget = manifest("bad", engine={"device": "cpu", "tokenBudget": 16, "maxSequences": 32})
    with pytest.raises(Exception, match=r"tokenBudget.*maxSequences|maxSequences.*tokenBudget"):
        namespace.apply(budget)
    rollout = manifest("bad", rollout={"maxSurge": 0, "maxUnavailable": 0})
    with pytest.raises(Exception, match="maxSurge"):
        namespace.apply(rollout)
    with pytest.raises(Exception, match=r"spec\.model\.source"):
        namespace.apply(manifest("bad", model={"source": "smollm2.gguf"}))
    assert namespace.items("fgd") == []


def test_a_model_that_is_not_there_says_so_in_the_condition(namespace: ServedNamespace) -> None:
    namespace.apply(manifest("lost", model={"source": "file:///models/no-such-model.gguf"}))

    def told() -> Object | None:
        ready = namespace.condition("Ready", "lost")
        return ready if "no-such-model.gguf" in ready["message"] else None

    ready = eventually(told, within=90, what="the engine's own words in the Ready condition")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", "BadConfiguration")
    assert "no such file or directory" in ready["message"]
