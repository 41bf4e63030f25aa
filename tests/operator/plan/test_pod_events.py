"""Which Events of a pod name the cause, as a table."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from fastgen_operator.kinds import Object
from fastgen_operator.objects.model_cache import Job
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.pod_events import failure_in_events, lacks_containers, lacks_pods, refusal_in_events
from harness.objects import container, leaving, pod

CREATED = "2026-01-01T00:00:00Z"
SOON, LATE = datetime.fromisoformat("2026-01-01T00:00:01Z"), datetime.fromisoformat("2026-01-01T00:00:02Z")
BEHIND = datetime.fromisoformat("2025-12-31T20:00:00Z")
SECRET = 'secret "nope" not found'


def made(**status: Any) -> Object:
    found = pod(**status)
    return {**found, "metadata": {**found["metadata"], "uid": "uid", "creationTimestamp": CREATED}}


def waiting(reason: str) -> Object:
    return container(state={"waiting": {"reason": reason}})


@pytest.mark.parametrize(
    ("subject", "lacks"),
    [
        (made(), True),
        (made(**waiting("ContainerCreating")), True),
        (made(**waiting("PodInitializing")), True),
        (made(**waiting("ImagePullBackOff")), False),
        (made(**container(state={"running": {}})), False),
        (made(**container(state={"terminated": {"exitCode": 1}})), False),
        (made(scheduled=""), False),
        (made(phase="Failed"), False),
        (leaving(made()), False),
    ],
)
def test_only_pods_on_a_node_without_containers_are_looked_up(subject: Job, lacks: bool) -> None:
    assert lacks_containers(Pod(subject), LATE) is lacks
    assert not lacks_containers(Pod(subject), SOON)
    assert lacks_containers(Pod(subject), BEHIND) is lacks, "the operator's clock is behind the API server's"


def event(reason: str, message: str = "", *, second: int = 10, kind: str = "Warning", **fields: Any) -> Object:
    time = {"lastTimestamp": f"2026-01-01T00:00:{second:02}Z"}
    return {"type": kind, "reason": reason, "message": message, "involvedObject": {"uid": "uid"}, **time, **fields}


MOUNT = event("FailedMount", SECRET, count=2)
ATTACH = event("FailedAttachVolume", "Multi-Attach error")
REFUSED = event("FailedAttachVolume", "AttachVolume.Attach failed: quota exceeded")

NO_PLUGIN = 'failed to get Plugin from volumeSpec for volume "models" err=no volume plugin matched'

EVENTS: dict[str, tuple[list[Object], str | None, str]] = {
    "none": ([], None, ""),
    "a mount": ([MOUNT], "FailedMount", SECRET),
    "a mount that failed once": ([{**MOUNT, "count": 1}], None, ""),
    "an Event of a series": (
        [event("FailedMount", SECRET, series={"count": 2, "lastObservedTime": "2026-01-01T00:00:10.000000Z"})],
        "FailedMount",
        SECRET,
    ),
    "an attachment, reported once": ([ATTACH], "FailedAttachVolume", "Multi-Attach"),
    "the remedy for a volume on another node": ([ATTACH], "FailedAttachVolume", "use a ReadWriteMany volume"),
    "another failed attachment": ([REFUSED], "FailedAttachVolume", "quota exceeded"),
    "the cause before its effect": ([MOUNT, ATTACH], "FailedAttachVolume", "Multi-Attach"),
    "the precise message first": (
        [event("FailedMount", "Unable to attach or mount volumes: x", count=9, second=59), MOUNT],
        "FailedMount",
        SECRET,
    ),
    "over since the image is pulled": ([MOUNT, event("Pulling", second=11, kind="Normal")], None, ""),
    "again after progress": ([MOUNT, event("SuccessfulAttachVolume", second=9, kind="Normal")], "FailedMount", SECRET),
    "of an earlier pod": ([{**MOUNT, "involvedObject": {"uid": "another"}}], None, ""),
    "another warning": ([event("Unhealthy", "probe failed", count=5)], None, ""),
    "a network that is not ready": (
        [event("NetworkNotReady", "network is not ready: cni plugin not initialized", count=2)],
        "FailedCreatePodSandBox",
        "its node has no network: network is not ready: cni plugin",
    ),
    "devices of a claim": (
        [event("FailedPrepareDynamicResources", "Failed to prepare dynamic resources: no driver", count=2)],
        "ContainerNotCreated",
        "its devices cannot be prepared: Failed",
    ),
    "a block volume": ([event("FailedMapVolume", "no device", count=2)], "FailedMount", "cannot be mapped: no device"),
    "a network": ([event("FailedCreatePodSandBox", "cni", count=2)], "FailedCreatePodSandBox", "cni"),
}


@pytest.mark.parametrize("case", EVENTS)
def test_the_failure_is_the_cause_in_the_events(case: str) -> None:
    events, reason, words = EVENTS[case]
    failure = failure_in_events(Pod(made()), events)
    assert (None if failure is None else failure.reason) == reason
    assert failure is None or (words in failure.message and failure.message.startswith("pod chat-new-x on node n1: "))


def test_only_a_volume_on_another_node_gets_the_remedy_of_sharing_it() -> None:
    failure = failure_in_events(Pod(made()), [REFUSED])
    assert failure is not None
    assert failure.message.endswith("quota exceeded")


def job(*, condition: str = "", **spec: Any) -> Job:
    conditions = [{"type": condition, "status": "True"}] if condition else []
    metadata = {"name": "chat-fetch-1", "uid": "uid", "creationTimestamp": CREATED}
    return Job({"metadata": metadata, "spec": spec, "status": {"conditions": conditions}})


def owned(uid: str) -> Object:
    return {"metadata": {"ownerReferences": [{"uid": uid, "controller": True}]}}


@pytest.mark.parametrize(
    ("subject", "pods", "lacks"),
    [
        (job(), [], True),
        (job(), [owned("another")], True),
        (job(), [owned("uid")], False),
        # A pod that was evicted has no successor.
        (job(), [{**owned("uid"), "status": {"phase": "Failed"}}], True),
        (job(suspend=True), [], False),
        (job(condition="Complete"), [], False),
        (job(condition="Failed"), [], False),
    ],
)
def test_only_jobs_that_should_have_a_pod_are_looked_up(subject: Job, pods: list[Object], lacks: bool) -> None:
    assert lacks_pods(subject, map(Pod, pods), LATE) is lacks
    assert not lacks_pods(subject, map(Pod, pods), SOON)


def refused(suffix: str, **fields: Any) -> Object:
    return event("FailedCreate", f'Error creating: pods "chat-fetch-1-{suffix}" is forbidden: exceeded quota', **fields)


def test_the_refusal_of_a_jobs_pod_is_the_same_text_at_each_attempt() -> None:
    later = refused("zzzzz", second=20)
    later["message"] = f"(combined from similar events): {later['message']}"
    first, last = (refusal_in_events(job(), events) for events in ([refused("abc12")], [refused("abc12"), later]))
    assert first is not None
    assert first == last
    assert first.message == "the API server rejects the pod of Job chat-fetch-1: forbidden: exceeded quota"


def test_a_refusal_is_over_when_a_pod_was_created() -> None:
    created = event("SuccessfulCreate", second=20, kind="Normal")
    assert refusal_in_events(job(), [refused("abc12"), created]) is None
    assert refusal_in_events(job(), []) is None


def test_a_kubelet_without_image_volumes_is_named() -> None:
    failed = event("FailedMount", NO_PLUGIN, count=2)
    seen = made()
    found = failure_in_events(Pod(seen), [failed])
    assert found is not None
    assert found.reason == "FailedMount", "it has no image volume"
    image: Object = {"name": "models", "image": {"reference": "registry.example/m:1"}}
    found = failure_in_events(Pod({**seen, "spec": {**seen["spec"], "volumes": [image]}}), [failed])
    assert found is not None
    assert found.reason == "ImageVolumesUnsupported"
    assert found.message.endswith("and with the kubelet's feature gate ImageVolume, which is on from Kubernetes 1.35")
