"""A write that reaches the API server after a newer one changes nothing: it names the version it was planned from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import SERVICE_ACCOUNT, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.metrics import Metrics
from harness.chart import operator_kubeconfig
from harness.process import OperatorProcess
from harness.proxy import Proxy, Request
from harness.space import NOW, Space, resource
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

CHILDREN = "fgd,serviceaccounts,services,networkpolicies,poddisruptionbudgets,deployments,pvc,jobs"
TINY = {"model": {"source": "hf://tests/tiny"}, "cache": {"size": "1Gi"}}


def versions(space: Space) -> dict[str, str]:
    metadata = [item["metadata"] for item in space.items(CHILDREN)]
    return {each["uid"]: each["resourceVersion"] for each in metadata}


def settled(space: Space, operator: OperatorProcess) -> None:
    """Return after the operator wrote nothing for a while."""
    seen: list[dict[str, float]] = [{}]

    def is_quiet() -> bool:
        operator.let_resyncs_pass(2)
        seen.append(operator.writes())
        return seen[-1] == seen[-2]

    eventually(is_quiet, within=30, what=f"no more writes in {space.name}")


def finish_download(space: Space) -> None:
    """Let the download Job complete; the test bed has no kubelet."""

    def pending() -> list[Object]:
        """Return the pods of downloads without those of an earlier one, which may still be there."""
        pods = space.items("pods", labels="job-name")
        return [
            pod for pod in pods if pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]
        ]

    (pod,) = eventually(pending, within=20, what="a download")
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": NOW, "finishedAt": NOW}
    container = {"name": pod["spec"]["containers"][0]["name"], "image": "", "imageID": "", "restartCount": 0}
    status = {
        "phase": "Succeeded",
        "containerStatuses": [{**container, "ready": False, "state": {"terminated": ended}}],
    }
    space.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")


def live_through_many_writes(space: Space, operator: OperatorProcess) -> None:
    """Create, scale, change, take over and delete children of two resources."""
    space.apply(resource(replicas=2))
    space.finish_rollout(count=2)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    space.apply(resource(replicas=1))  # sets deletion costs
    space.finish_rollout()
    space.apply(resource(engine={"device": "cpu", "image": "engine:other"}))
    space.finish_rollout()
    patch = [{"op": "add", "path": "/spec/template/spec/nodeSelector/disk", "value": "none"}]
    space.kubectl("patch", "deployment", "chat", "--type=json", "--patch", json.dumps(patch))
    eventually(lambda: "disk" not in space.template()["spec"]["nodeSelector"], within=20, what="the take-over")
    space.finish_rollout()
    space.apply(resource("tiny", **TINY))
    finish_download(space)
    space.finish_rollout("tiny")
    space.apply(resource("tiny", **{**TINY, "model": {**TINY["model"], "revision": "v2"}}))
    finish_download(space)
    space.finish_rollout("tiny")
    settled(space, operator)


def test_no_write_takes_effect_when_it_arrives_again(plane: ControlPlane, space: Space, tmp_path: Path) -> None:
    """Whatever a paused operator still sends, the API server has seen later writes to the same objects."""
    with Proxy(operator_kubeconfig(plane)) as proxy:
        arguments = ("--namespace", space.name)
        operator = OperatorProcess(proxy.kubeconfig(tmp_path / "kubeconfig"), tmp_path / "log", arguments)
        operator.start()
        try:
            live_through_many_writes(space, operator)
        finally:
            operator.stop()
        written = [
            request
            for request, status in proxy.responses
            if request.is_write
            and status < 300
            and not request.path.endswith("/events")
            and "/events/" not in request.path
        ]
        before = versions(space)
        names = {item["metadata"]["name"] for item in space.items(CHILDREN)}
        # A create is refused while its object exists; one that was deleted since is created again, and deleted again by
        # the operator that leads.
        late = [request for request in written if request.path.removesuffix("/status").rpartition("/")[2] in names]
        answers = [(request.method, request.path, proxy.send_again(request)) for request in late]
    assert [answer for answer in answers if answer[2] not in (404, 409)] == []
    assert versions(space) == before
    assert {kind(request) for request in written} >= {
        *("serviceaccounts", "services", "networkpolicies", "poddisruptionbudgets", "deployments"),
        *("persistentvolumeclaims", "jobs", "status"),
    }, "the writes of every kind are tried"
    assert "DELETE" in {request.method for request in written}


def kind(request: Request) -> str:
    return "status" if request.path.endswith("/status") else request.path.split("/")[-2]


def test_an_apply_never_creates_an_object_that_was_deleted_since(space: Space) -> None:
    client = KubeClient(space.server, InformerCache(), Metrics(), lambda: True)
    # No controller writes it.
    manifest: Object = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "late", "namespace": space.name},
    }
    seen = client.apply(SERVICE_ACCOUNT, manifest, None)
    with pytest.raises(KubeError) as exists:
        client.apply(SERVICE_ACCOUNT, manifest, None)
    assert exists.value.status == 409
    space.kubectl("delete", "serviceaccount", "late")
    with pytest.raises(KubeError) as gone:
        client.apply(SERVICE_ACCOUNT, manifest, seen)
    assert gone.value.status == 409
    assert client.get(SERVICE_ACCOUNT, space.name, "late") is None
    new = client.apply(SERVICE_ACCOUNT, manifest, None)
    old_version = {"resourceVersion": seen["metadata"]["resourceVersion"]}
    for stale in (seen, {**new, "metadata": {**new["metadata"], **old_version}}):
        with pytest.raises(KubeError) as changed:
            client.annotate(SERVICE_ACCOUNT, stale, {"late": "yes"})
        assert changed.value.status == 409
    assert not client.delete(SERVICE_ACCOUNT, seen), "the name belongs to another object now"
    assert client.delete(SERVICE_ACCOUNT, new)
