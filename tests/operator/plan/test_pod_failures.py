"""Messages about pods that do not serve, and which of their states are failures."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastgen.kv_cache.memory import AvailableMemory
from fastgen.kv_cache.sizing import MemoryNeed
from fastgen.runner.memory_check import check_need
from fastgen.settings import ConfigError
from fastgen_operator.kinds import Object
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.pod_failures import Failure, failure_of, state_of
from harness.objects import container, pod

START, NOW = "2026-01-01T00:00:00Z", datetime(2026, 1, 1, 0, 5, tzinfo=UTC)
LOADED = "2026-01-01T00:30:16Z"  # 1800 s of start deadline, then the 15 s of preStop


def ended(code: int, message: str = "", *, reason: str = "Error", finished: str = "2026-01-01T00:00:10Z") -> Object:
    words = {"exitCode": code, "reason": reason, "message": message, "startedAt": START, "finishedAt": finished}
    return {"terminated": words}


def too_large() -> ConfigError:
    """Return what the engine says before it ends."""
    gib = 1 << 30
    with pytest.raises(ConfigError) as refused:
        check_need(MemoryNeed(weights=40 * gib, step=0, cache=gib), AvailableMemory(24 * gib, limited=True), "cuda")
    return refused.value


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


def with_helper(kind: str, spec: Object, **status: Any) -> Object:
    """Return a pod with another container `helper` and an engine that has not started."""
    base = pod()
    helper = {"name": "helper", "image": "h", "ready": False, "restartCount": 0, **status}
    statuses = {
        "initContainerStatuses": [helper] if kind == "initContainers" else [],
        "containerStatuses": [
            *([helper] if kind == "containers" else []),
            {"name": "engine", "image": "e", "ready": False, "restartCount": 0, "state": waiting("PodInitializing")},
        ],
    }
    spec_of_pod = {**base["spec"], kind: [*base["spec"].get(kind, ()), {"name": "helper", "image": "h:1", **spec}]}
    return {**base, "spec": spec_of_pod, "status": {**base["status"], **statuses}}


MODEL = "registry.example/smollm2:1@sha256:00"


def with_image_volume(pod: Object) -> Object:
    volumes = [*pod["spec"]["volumes"], {"name": "models", "image": {"reference": MODEL}}]
    return {**pod, "spec": {**pod["spec"], "volumes": volumes}}


def pulling(reason: str, message: str) -> Object:
    return with_image_volume(pod(**container(state=waiting(reason, message))))


# A message of the kubelet, from k8s.io/kubernetes/pkg/kubelet/images/image_manager.go.
NOT_FOUND = 'rpc error: code = NotFound desc = failed to pull and unpack image "{}": failed to resolve reference'
# A message of containerd 1.6, shortened. Each attempt has another container id.
NO_MOUNT = f'failed to generate container "{64 * "a"}" spec: failed to mkdir "": mkdir : no file'
OF_MODEL, OF_ENGINE = f"the image {MODEL} of the volume models", "the image engine:test of the engine"
FAILURES: list[tuple[str, Object, str, str]] = [
    (
        "out of memory, with the memory it had",
        pod(**container(state=ended(137, "loading\n", reason="OOMKilled"))),
        "OutOfMemory",
        "the engine was killed for using more memory than its limit of 2Gi; last log line: loading",
    ),
    (
        "out of memory, started again",
        pod(**container(restarts=2, state={"running": {}}, lastState=ended(137, reason="OOMKilled"))),
        "OutOfMemory",
        "its limit of 2Gi; restarted 2 times",
    ),
    (
        "a start that takes too long",
        pod(**container(restarts=1, state={"running": {}}, lastState=ended(137, "layer 3 of 80", finished=LOADED))),
        "StartupDeadlineExceeded",
        "the engine was stopped because it was not ready 1800 s after its start; last log line: layer 3 of 80",
    ),
    (
        "a hung engine that the kubelet ends again and again",
        pod(**container(restarts=3, state={"running": {}}, lastState=ended(137))),
        "CrashLoopBackOff",
        "was stopped from outside (exit code 137), for example after failed liveness probes; restarted 3 times",
    ),
    (
        "a rejected configuration without a message",
        pod(**container(state=ended(2))),
        "BadConfiguration",
        "exit code 2",
    ),
    (
        "a model that needs more memory than the GPU has, before it is loaded again",
        pod(**container(state=ended(2, f"fastgen serve: error: {too_large()}"))),
        "BadConfiguration",
        "needs 41.0 GiB of memory (weights 40.0, a step 0.0, KV cache and swap space 1.0), the GPU has 24.0 left",
    ),
    (
        "an error of the GPU, once",
        pod(**container(restarts=1, state={"running": {}}, lastState=ended(3, "log\nthe GPU failed: Xid\n"))),
        "DeviceFailed",
        "the GPU failed: Xid",
    ),
    (
        "a hung engine, restarted twice",
        pod(**container(restarts=2, state={"running": {}}, lastState=ended(4, "the engine hangs"))),
        "EngineHung",
        "the engine hangs; restarted 2 times",
    ),
    (
        "a container that the runtime cannot start",
        pod(**container(state=waiting("RunContainerError", "exec: no such file"))),
        "ContainerNotCreated",
        "the engine cannot be created: exec: no such file",
    ),
    (
        "the model's image, as the kubelet names it",
        pulling("ImagePullBackOff", f'Back-off pulling image "{MODEL}": ErrImagePull: not found'),
        "ImagePullBackOff",
        f"pod chat-new-x: {OF_MODEL} cannot be pulled: Back-off",
    ),
    (
        "the model's image, as the runtime names it",
        pulling("ErrImagePull", NOT_FOUND.format("registry.example/smollm2@sha256:00")),
        "ImagePullBackOff",
        f"pod chat-new-x: {OF_MODEL} cannot be pulled: rpc error",
    ),
    (
        "the engine's image beside a model's",
        pulling("ErrImagePull", NOT_FOUND.format("docker.io/library/engine:test")),
        "ImagePullBackOff",
        f"pod chat-new-x: {OF_ENGINE} cannot be pulled: rpc error",
    ),
    (
        "one of both images",
        pulling("ErrImagePull", "registry is down"),
        "ImagePullBackOff",
        f"pod chat-new-x: {OF_ENGINE} or {OF_MODEL} cannot be pulled: registry is down",
    ),
    (
        "a runtime without image volumes",
        pulling("CreateContainerError", NO_MOUNT),
        "ImageVolumesUnsupported",
        'the engine cannot be created: failed to generate container spec: failed to mkdir "": mkdir : no file: a node '
        "mounts images as volumes with containerd 2.1 or later or CRI-O",
    ),
    (
        "the same words without an image volume",
        pod(**container(state=waiting("CreateContainerError", 'failed to mkdir "": mkdir : no such file'))),
        "ContainerNotCreated",
        "the engine cannot be created: failed to mkdir",
    ),
    (
        "an image that a runtime with image volumes cannot mount",
        pulling("CreateContainerError", "ImageVolumeMountFailed: unsupported media type"),
        "ContainerNotCreated",
        "the engine cannot be created: ImageVolumeMountFailed: unsupported media type",
    ),
    (
        "a model that is not in the mounted image",
        with_image_volume(pod(**container(state=ended(2, "model /mnt/models/m: no such file or directory: give x")))),
        "BadConfiguration",
        "no such file or directory: give x; if the image has it, a node mounts images as volumes with",
    ),
    (
        "an init container that fails",
        with_helper("initContainers", {}, state=waiting("CrashLoopBackOff"), lastState=ended(1, "401 Unauthorized")),
        "CrashLoopBackOff",
        "init container helper ended with exit code 1 (Error); last log line: 401 Unauthorized",
    ),
    (
        "an init container without an image",
        with_helper("initContainers", {}, state=waiting("ImagePullBackOff", "not found")),
        "ImagePullBackOff",
        "the image h:1 of init container helper cannot be pulled: not found",
    ),
    (
        "a sidecar that fails",
        with_helper("initContainers", {"restartPolicy": "Always"}, restartCount=4, state={}, lastState=ended(2, "no")),
        "CrashLoopBackOff",
        "sidecar helper ended with exit code 2 (Error); last log line: no; restarted 4 times",
    ),
    (
        "another container that fails",
        with_helper("containers", {}, restartCount=4, state={}, lastState=ended(1, "no")),
        "CrashLoopBackOff",
        "container helper ended with exit code 1",
    ),
]


@pytest.mark.parametrize(("seen", "reason", "words"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES])
def test_a_failure_message_quotes_the_pod(seen: Object, reason: str, words: str) -> None:
    failure = failure_of(Pod(seen))
    assert failure is not None
    assert failure.reason == reason
    assert failure.message.startswith("pod chat-new-x: ")
    assert words in failure.message


def test_running_out_of_memory_without_a_limit_names_the_node() -> None:
    seen = pod(**container(state=ended(137, reason="OOMKilled")))
    seen["spec"]["containers"][0]["resources"] = {}
    assert "more memory than its node had left, as it has no limit" in state_of(Pod(seen))


STATES: list[tuple[str, Object, str]] = [
    ("no node yet", pod(scheduled=""), "waits for the scheduler"),
    ("no place", pod(scheduled="0/1 nodes are available"), "0/1 nodes are available"),
    ("nothing reported yet", pod(), "starts on node n1"),
    ("an image being pulled", pod(**container(state=waiting("ContainerCreating"))), "starts on node n1"),
    (
        "loading",
        pod(**container(state={"running": {"startedAt": START}})),
        f"the engine has been loading since {START}; /ready has not passed yet",
    ),
    (
        "a first crash",
        pod(**container(state=ended(1, "CUDA error"))),
        "the engine ended with exit code 1 (Error); last log line: CUDA error",
    ),
    (
        "loading after a crash",
        pod(**container(restarts=1, state={"running": {"startedAt": START}}, lastState=ended(1, "CUDA error"))),
        f"the engine has been loading since {START} again, "
        "after it ended with exit code 1 (Error); last log line: CUDA error",
    ),
    (
        "probes that pass no more",
        pod(**container(started=True, state={"running": {"startedAt": START}})),
        "/ready fails: it is draining, overloaded or hung",
    ),
    (
        "an init container at work",
        with_helper("initContainers", {}, state={"running": {"startedAt": START}}),
        f"init container helper has been running since {START}",
    ),
    (
        "an init container that has done its work",
        with_helper("initContainers", {}, state=ended(0, reason="Completed")),
        "starts on node n1",
    ),
]


@pytest.mark.parametrize(("seen", "words"), [row[1:] for row in STATES], ids=[row[0] for row in STATES])
def test_the_state_of_a_starting_pod_is_described(seen: Object, words: str) -> None:
    assert failure_of(Pod(seen)) is None
    assert state_of(Pod(seen)).startswith("pod chat-new-x: ")
    assert words in state_of(Pod(seen))


def test_the_stage_of_a_loading_engine_replaces_the_probe() -> None:
    seen = pod(**container(state={"running": {"startedAt": START}}))
    words = f"pod chat-new-x: the engine has been loading since {START}: loading weights 40 %"
    assert state_of(Pod(seen), stage="loading weights 40 %") == words


def test_a_stage_is_not_of_another_container() -> None:
    seen = with_helper("containers", {}, state={"running": {"startedAt": START}})
    assert "loading weights" not in state_of(Pod(seen), stage="loading weights 40 %")


def behind_gates(**reported: str) -> Object:
    """Return a pod whose containers are ready and that two gates keep from being ready; keywords are their status."""
    found = pod(**container(ready=True, started=True, state={"running": {"startedAt": START}}))
    found["spec"]["readinessGates"] = [{"conditionType": "target-health"}, {"conditionType": "cloud"}]
    (ready,) = (each for each in found["status"]["conditions"] if each["type"] == "Ready")
    ready |= {"reason": "ReadinessGatesNotReady", "lastTransitionTime": START}
    others = {"ContainersReady": "True", **reported}
    found["status"]["conditions"] += [{"type": kind, "status": status} for kind, status in others.items()]
    return found


def test_the_readiness_gate_that_keeps_a_pod_from_being_ready_is_named() -> None:
    assert "waits for the readiness gate target-health and cloud: see" in state_of(Pod(behind_gates()))
    assert "waits for the readiness gate cloud: see" in state_of(Pod(behind_gates(**{"target-health": "True"})))
    assert Pod(behind_gates()).is_starting
    lost = behind_gates()
    lost["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T05:00:00Z"
    assert not Pod(lost).is_starting, "it was ready, and the gate has closed again"


def test_a_pod_with_a_gate_whose_containers_are_not_ready_is_described_by_them() -> None:
    loading = behind_gates()
    loading["status"] |= container(state={"running": {"startedAt": START}})
    loading["status"]["conditions"] = loading["status"]["conditions"][:-1]
    assert "has been loading since" in state_of(Pod(loading))
    assert Pod(loading).is_starting


def test_a_node_that_does_not_respond_is_named() -> None:
    seen = pod(**container(ready=True, started=True, state={"running": {}}))
    seen["status"]["conditions"].append({"type": "ContainersReady", "status": "True"})
    assert "its node n1 does not respond" in state_of(Pod(seen))


def crashing(*, restarts: int) -> Object:
    return pod(
        ready=True,
        **container(restarts=restarts, ready=True, started=True, state={"running": {}}, lastState=ended(1, "bang")),
    )


def test_a_model_that_crashes_after_its_first_tokens_stays_failed_between_two_crashes() -> None:
    failure = failure_of(Pod(crashing(restarts=3)), NOW)
    assert isinstance(failure, Failure)
    assert failure.reason == "CrashLoopBackOff"
    assert failure_of(Pod(crashing(restarts=2)), NOW) is None
    assert failure_of(Pod(crashing(restarts=3)), NOW.replace(hour=1)) is None, "ten minutes of peace are forgiven"


def test_a_node_whose_clock_is_ahead_does_not_keep_a_pod_failed_for_hours() -> None:
    assert failure_of(Pod(crashing(restarts=3)), NOW - timedelta(minutes=5)) is not None
    assert failure_of(Pod(crashing(restarts=3)), NOW - timedelta(hours=8)) is None
