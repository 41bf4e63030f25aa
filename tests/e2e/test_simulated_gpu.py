"""A pod that holds a GPU serves on the test cluster, and its failures show in the resource's conditions.

The node's GPUs are simulated (`cluster.gpus`). The pods' specifications are those of real GPUs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster import gpus, pod_faults, standin
from cluster.bed import Bed
from e2e.conftest import new_namespace
from fastgen import LLM, SamplingParams
from support.deployments import ServedNamespace, manifest
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "def fibonacci(n):\n"]
TOKENS = 20  # the first 16 steps of an engine may take long before it counts as hung
# Small steps, because the time after which an engine counts as hung is at least 20 times that of the largest.
ENGINE = {
    "device": "cuda",
    "tokenBudget": 16,
    "maxModelLength": 2048,
    "extraArgs": ["--step-timeout-seconds", "5"],
}


# Of which the node has three: the demo model's nine heads cannot be divided by two.
SEVERAL = {"count": 3, "resourceName": "example.com/gpu"}


def on_gpu(name: str, gpu: dict[str, Any] | None = None, memory: str = "3Gi", **spec: Any) -> dict[str, Any]:
    resources = {"gpu": gpu or {"count": 1}, "limits": {"memory": memory}}
    return manifest(name, engine=ENGINE, resources=resources, **spec)


@pytest.fixture(scope="module")
def space(bed: Bed, request: pytest.FixtureRequest) -> Iterator[ServedNamespace]:
    """A namespace with the resource `chat` on one GPU."""
    if bed.kind != "native":
        pytest.skip("GPUs are simulated in the stand-in image of a native node only")
    with gpus.simulated_gpus(), new_namespace(bed, request.node) as made:
        made.apply(on_gpu("chat"))
        yield made


def completions(url: str, prompts: list[str]) -> list[str]:
    """Return the greedy completions, computed in one batch."""
    body = {"model": "smollm2", "prompt": prompts, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    response.raise_for_status()
    return [choice["text"] for choice in response.json()["choices"]]


def first_answers(url: str) -> list[str]:
    """Return the completions of a pod whose Service may not know it yet."""
    return eventually(lambda: completions(url, PROMPTS), within=60, what="answers")


def only_pod(space: ServedNamespace) -> dict[str, Any]:
    (pod,) = (pod for pod in space.pods("chat") if "deletionTimestamp" not in pod["metadata"])
    return pod


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The completions of the CPU's kernels."""
    llm = LLM(str(standin.model_file()), max_model_length=2048, quantization="none")
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return [output.text for output in llm.generate(list(PROMPTS), sampling)]


def test_a_pod_with_a_gpu_serves_the_tokens_of_the_cpu(space: ServedNamespace, expected: list[str]) -> None:
    space.wait_condition("Ready", "True")
    limits = only_pod(space)["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    with space.url("chat") as url:
        assert first_answers(url) == expected
        assert 'device="cuda"' in httpx.get(f"{url}/metrics", timeout=60).text
    assert "simulated GPU" in space.kubectl("logs", only_pod(space)["metadata"]["name"])


@pytest.mark.parametrize(
    ("break_gpu", "reason", "words"),
    [
        (gpus.fail, "DeviceFailed", "the GPU failed: CUDA error: an illegal memory access was encountered"),
        (gpus.hang, "EngineHung", "the engine hangs: it has had work for"),
    ],
)
def test_a_broken_gpu_shows_in_the_conditions_and_the_pod_is_replaced(
    break_gpu: Any, reason: str, words: str, space: ServedNamespace
) -> None:
    space.wait_condition("Ready", "True")
    before = only_pod(space)["metadata"]
    with space.url("chat") as url:
        expected = first_answers(url)
        break_gpu(before["name"])
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            completions(url, PROMPTS)
        for kind in ("Progressing", "Ready"):
            condition = space.wait_condition(kind, "False", reason)
            assert words in condition["message"]
        space.wait_condition("Ready", "True")
        assert only_pod(space)["metadata"]["uid"] != before["uid"], "the kubelet restarts an engine on the same GPU"
        assert first_answers(url) == expected


def test_a_second_deployment_waits_for_the_gpu_of_the_first(space: ServedNamespace) -> None:
    space.wait_condition("Ready", "True")
    space.apply(on_gpu("second"))
    waiting = space.wait_condition("PodsScheduled", "False", "InsufficientGPU", name="second")
    assert "Insufficient nvidia.com/gpu" in waiting["message"]
    assert "a replica needs 1 nvidia.com/gpu, and the node with the most free has 0 of its 1" in waiting["message"]
    assert space.condition("Ready", "chat")["status"] == "True"
    space.kubectl("scale", "fgd/chat", "--replicas=0")
    eventually(lambda: not space.pods("chat"), within=60, what="the deletion of the first deployment's pod")
    # Nothing is routed to it, so it need not serve for 15 more seconds.
    space.kubectl("delete", "pods", "-l", "fastgen.dev/deployment=chat", "--grace-period=1", "--wait=false")
    space.wait_condition("Ready", "True", name="second")
    with space.url("second") as url:
        assert first_answers(url)


@pytest.fixture
def several(space: ServedNamespace) -> None:
    """Give the node three GPUs of another name."""
    (node,) = space.kubectl("get", "nodes", "--output=name").split()
    gpus = json.dumps({"status": {"capacity": {SEVERAL["resourceName"]: str(SEVERAL["count"])}}})
    space.kubectl("patch", node, "--subresource=status", "--type=merge", f"--patch={gpus}")


@pytest.mark.usefixtures("several")
def test_a_model_on_several_gpus_survives_a_killed_rank(space: ServedNamespace, expected: list[str]) -> None:
    for name in ("chat", "second"):
        space.kubectl("delete", f"fgd/{name}", "--ignore-not-found")
    space.apply(on_gpu("divided", SEVERAL, memory="4Gi"))
    space.wait_condition("Ready", "True", name="divided")
    (pod,) = space.pods("divided")
    engine = pod["spec"]["containers"][0]
    assert engine["resources"]["limits"][SEVERAL["resourceName"]] == "3"
    assert engine["args"][engine["args"].index("--tensor-parallel") + 1] == "3"
    with space.url("divided") as url:
        assert first_answers(url) == expected
        pod_faults.kill(pod, "fastgen.runner.ranks.process")
        failed = space.wait_condition("Ready", "False", name="divided")
        assert re.search(r"rank [12]: its process was killed by SIGKILL", failed["message"]), failed
        space.wait_condition("Ready", "True", name="divided")
        assert first_answers(url) == expected
