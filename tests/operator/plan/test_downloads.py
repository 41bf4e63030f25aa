"""A model's download against a real API server with its Job and volume controllers; the test sets the pod's status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastgen_operator.kinds import POD
from fastgen_operator.kube.transport import KubeError
from harness.adverse import quota
from harness.process import OperatorProcess
from harness.space import NOW, Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

HUB = "hf://tests/tiny"


def cached(**spec: Any) -> Object:
    model = {"source": HUB, "secretName": "token", **spec.pop("model", {})}
    return resource(model=model, cache={"size": "1Gi", **spec.pop("cache", {})}, **spec)


def download(space: Space) -> Object:
    """Return the pod of the download once it is not being deleted."""

    def look() -> Object | None:
        pods = space.items("pods", labels="fastgen.dev/deployment=chat_fetch")
        found = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp") and not ended(pod)]
        return found[0] if len(found) == 1 else None

    pod = eventually(look, within=20, what="the download's pod", every=0.1)
    assert pod is not None
    return pod


def ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def report(space: Space, pod: Object, state: Object, *, phase: str = "Running", last: Object | None = None) -> None:
    """Set the container status of the download's pod, as a kubelet would."""
    container = {
        **{
            "name": "fetch",
            "image": "engine:test",
            "imageID": "",
            "ready": False,
            "restartCount": 0 if last is None else 1,
        },
        "state": state,
        "lastState": last or {},
    }
    status = {
        "phase": phase,
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": NOW}],
        "containerStatuses": [container],
    }
    space.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")


def terminated(code: int, words: str = "") -> Object:
    return {
        "terminated": {
            **{"exitCode": code, "reason": "Error" if code else "Completed", "message": words},
            **{"startedAt": NOW, "finishedAt": NOW},
        }
    }


def succeed(space: Space) -> None:
    report(space, download(space), terminated(0), phase="Succeeded")


def test_a_failed_download_is_reported_and_pods_are_created_after_it_succeeds(space: Space) -> None:
    space.apply(cached())
    pod = download(space)
    uid = space.get("fgd", "chat")["metadata"]["uid"]
    (job,) = space.items("jobs")
    for child in (job, space.get("pvc", "chat")):
        assert child["metadata"]["ownerReferences"][0]["uid"] == uid
    assert pod["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "token"}}]
    space.wait_condition("ModelCached", "Unknown", "Downloading")
    words = "fastgen: error: hf://tests/tiny: gated: accept its terms on the hub, and set HF_TOKEN\n"
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    report(space, pod, back_off, last=terminated(4, words))
    condition = space.wait_condition("Ready", "False", "AccessDenied")
    assert "gated: accept its terms" in condition["message"]
    assert space.pods() == []
    with pytest.raises(KubeError, match="not found"):
        space.get("deployment", "chat")
    report(space, pod, {"running": {"startedAt": NOW}}, last=terminated(4, words))
    space.wait_condition("ModelCached", "Unknown", "Downloading")
    succeed(space)
    space.wait_condition("ModelCached", "True", "Cached")
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")


def test_the_old_model_is_served_until_the_new_one_is_downloaded(space: Space, operator: OperatorProcess) -> None:
    space.apply(cached())
    succeed(space)
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    (old,), (first,) = space.pods(), space.items("jobs")
    space.apply(cached(model={"revision": "v2"}, replicas=2))
    space.wait_pods(2)
    new = download(space)
    assert new["spec"]["containers"][0]["args"].count("--keep") == 2
    space.wait_condition("ModelCached", "Unknown", "Downloading")
    settled = space.settled()
    operator.let_resyncs_pass(3)
    assert space.versions() == settled, "waiting is no reason to write"
    assert len(space.items("replicasets")) == 1
    assert old["metadata"]["name"] in [pod["metadata"]["name"] for pod in space.pods()]
    assert [job["metadata"]["name"] for job in space.items("jobs")] != [first["metadata"]["name"]]
    succeed(space)
    eventually(lambda: len(space.items("replicasets")) == 2, within=20, what="the new template")
    space.wait_condition("ModelCached", "True", "Cached")
    address = new["spec"]["containers"][0]["args"][3]
    args = space.get("deployment", "chat")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[1] == address


def test_an_interrupted_download_keeps_its_pod(space: Space, operator: OperatorProcess) -> None:
    space.apply(cached())
    pod = download(space)
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    for _ in range(3):
        report(space, pod, back_off, last=terminated(1, "fastgen: error: the response ended after 1 of 2 bytes\n"))
        space.wait_condition("ModelCached", "False", "DownloadFailed")
        operator.let_resyncs_pass(1)
        report(space, pod, {"running": {"startedAt": NOW}}, last=terminated(1))
        space.wait_condition("ModelCached", "Unknown", "Downloading")
    assert len(space.items("pods")) == 1
    assert len(space.items("jobs")) == 1


def test_a_corrected_secret_name_starts_a_new_download(space: Space) -> None:
    space.apply(cached())
    pod = download(space)
    waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "token" not found'}}
    report(space, pod, waiting, phase="Pending")
    condition = space.wait_condition("ModelCached", "False", "SecretNotFound")
    assert 'secret "token" not found' in condition["message"]
    space.apply(cached(model={"secretName": "other"}))

    def renewed() -> bool:
        return bool(download(space)["spec"]["containers"][0]["envFrom"][0]["secretRef"]["name"] == "other")

    eventually(renewed, within=30, what="a download with the other Secret")
    eventually(lambda: len(space.items("jobs")) == 1, within=20, what="the end of the old Job")


def test_a_volume_that_cannot_grow_is_reported_and_pods_still_scale(space: Space) -> None:
    space.apply(cached())
    succeed(space)
    space.wait_pods(1)
    space.apply(cached(cache={"size": "2Gi"}, replicas=2))
    condition = space.wait_condition("Progressing", "False", "ApplyRefused")
    assert "PersistentVolumeClaim was refused" in condition["message"]
    space.wait_pods(2)


def test_a_volume_grows_with_the_spec_and_keeps_what_others_add(space: Space, operator: OperatorProcess) -> None:
    name = f"{space.name}-volume"
    storage_class = {
        **{"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name}},
        **{"provisioner": "tests/none", "allowVolumeExpansion": True},
    }
    volume = {
        **{"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}},
        "spec": {
            **{"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": name},
            **{"hostPath": {"path": "/nowhere"}, "persistentVolumeReclaimPolicy": "Retain"},
        },
    }
    for obj in (storage_class, volume):
        space.cluster.kubectl("apply", "--filename", "-", stdin=json.dumps(obj))
    try:
        space.apply(cached(cache={"storageClassName": name}))
        eventually(lambda: space.get("pvc", "chat")["status"]["phase"] == "Bound", within=30, what="the bound volume")
        space.apply(cached(cache={"storageClassName": name, "size": "2Gi"}))

        def asked() -> bool:
            return bool(space.get("pvc", "chat")["spec"]["resources"]["requests"]["storage"] == "2Gi")

        eventually(asked, within=20, what="the larger request")
        assert len(space.items("jobs")) == 1
        # An autoresizer grows it further. The API server would reject the smaller size of the spec.
        space.patch("pvc/chat", {"spec": {"resources": {"requests": {"storage": "3Gi"}}}})
        operator.let_resyncs_pass(2)
        claim = space.get("pvc", "chat")
        assert claim["spec"]["resources"]["requests"]["storage"] == "3Gi"
        assert space.condition("Progressing")["reason"] != "ApplyRefused"
        operator.let_resyncs_pass(2)
        assert space.get("pvc", "chat")["metadata"]["resourceVersion"] == claim["metadata"]["resourceVersion"]
    finally:
        space.cluster.kubectl("delete", "pv", name, "--wait=false")
        space.cluster.kubectl("delete", "storageclass", name)


def test_nothing_is_written_after_the_download_and_everything_is_deleted_with_the_resource(
    space: Space, operator: OperatorProcess
) -> None:
    space.apply(cached())
    succeed(space)
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    settled = space.settled()
    operator.let_resyncs_pass(4)
    assert space.versions() == settled
    space.kubectl("delete", "fgd", "chat")
    eventually(lambda: space.items("jobs,pods,deployments") == [], within=30, what="an empty namespace")
    eventually(lambda: space.items("pvc") == [], within=30, what="the end of the volume")


def test_a_quota_that_requires_requests_and_limits_accepts_the_download(space: Space) -> None:
    quota(space, POD, "requests.cpu=2,requests.memory=4Gi,limits.cpu=2,limits.memory=4Gi")
    space.apply(cached())
    assert download(space)["spec"]["containers"][0]["name"] == "fetch"


def test_a_rejected_download_pod_is_reported_in_the_words_of_the_api_server(space: Space) -> None:
    quota(space, POD, "limits.memory=256Mi")
    space.apply(cached())
    condition = space.wait_condition("Ready", "False", "FailedCreate")
    assert "exceeded quota: none, requested: limits.memory=1Gi" in condition["message"]
    assert "reduce spec.model.download.resources, or raise the quota" in condition["message"]
    assert condition["message"].startswith("the API server rejects the pod of Job chat-fetch-")
    limits = {"resources": {"limits": {"memory": "200Mi"}}}
    space.apply(cached(model={"download": limits}))
    assert download(space)["spec"]["containers"][0]["resources"]["limits"] == limits["resources"]["limits"]
    space.wait_condition("ModelCached", "Unknown", "Downloading")


def test_a_sidecar_that_never_ends_does_not_keep_the_job_open(space: Space) -> None:
    space.apply(cached())
    pod = download(space)
    report(space, pod, terminated(0))
    sidecar = {"name": "proxy", "image": "p", "imageID": "", "ready": True, "restartCount": 0}
    statuses = space.get("pod", pod["metadata"]["name"])["status"]["containerStatuses"]
    sidecar["state"] = {"running": {"startedAt": NOW}}
    path = f"pod/{pod['metadata']['name']}"
    space.patch(path, {"status": {"containerStatuses": [*statuses, sidecar]}}, "status")
    space.wait_condition("ModelCached", "True", "Cached")
    eventually(lambda: space.items("pods", labels="fastgen.dev/deployment=chat_fetch") == [], within=30, what="no pod")
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    (job,) = space.items("jobs")
    assert job["metadata"]["annotations"]["fastgen.dev/downloaded"] == "true"

    def has_ended() -> bool:
        return "Failed" in [each["type"] for each in space.items("jobs")[0]["status"].get("conditions", ())]

    eventually(has_ended, within=20, what="the end of the Job")


def test_gated_pods_and_suspended_jobs_are_reported_as_such(space: Space) -> None:
    gate = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    owner = cached(podTemplate=gate)
    owner["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    space.apply(owner)
    pod = download(space)
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    (job,) = space.items("jobs")
    space.patch(f"job/{job['metadata']['name']}", {"spec": {"suspend": True}})
    condition = space.wait_condition("Ready", "False", "JobSuspended")
    assert "Kueue has not admitted it to the queue gpus" in condition["message"]
    space.patch(f"job/{job['metadata']['name']}", {"spec": {"suspend": False}})
    space.wait_condition("ModelCached", "Unknown", "Downloading")
    succeed(space)
    condition = space.wait_condition("Ready", "False", "SchedulingGated")
    assert "held by the scheduling gate kueue.x-k8s.io/admission" in condition["message"]
    assert space.get("deployment", "chat")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
