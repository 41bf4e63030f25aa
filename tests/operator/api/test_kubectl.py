"""kubectl against a real API server: columns, explain, wait, scale and rollout."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.commands import CommandError
from fastgen_operator.api.reference import PAGE_PATH, reference_page
from fastgen_operator.kube.transport import KubeError
from harness.edits import dotted, fields, spec_schema
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.waiting import eventually

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 3}


def test_the_reference_page_is_up_to_date() -> None:
    committed = Path(__file__).parents[3] / PAGE_PATH
    assert committed.read_text() == reference_page(), "run: python -m fastgen_operator.api.reference --write"


def test_the_reference_page_has_every_field() -> None:
    page = reference_page()
    for path in fields(spec_schema()):
        assert f"`{path[-1]}`" in page, dotted(path)


@pytest.mark.controlplane
def test_kubectl_get_shows_the_printer_columns_and_categories(space: Space, operator: OperatorProcess) -> None:
    del operator
    space.apply(resource())
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    header, row = space.kubectl("get", "fgd").splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "REASON", "REPLICAS", "DESIRED", "AGE"]
    assert row.split()[:-1] == ["chat", "file:///models/tiny.gguf", "True", "AllReplicasReady", "1", "1"]
    header, row = space.kubectl("get", "fgd", "--output=wide").splitlines()
    assert header.split()[6:] == ["TOKENS/S", "CANARY", "URL", "CLASS", "AGE"]
    assert f"http://chat.{space.name}.svc:8000/v1" in row.split()
    for category in ("all", "fastgen"):
        assert "fastgendeployment.fastgen.dev/chat" in space.kubectl("get", category, "--output=name"), category


@pytest.mark.controlplane
def test_kubectl_explain_shows_the_field_descriptions(space: Space) -> None:
    said = space.kubectl("explain", "fgd.spec.autoscaling", "--recursive=false")
    assert "Scales the replicas automatically on arriving and queued tokens" in " ".join(said.split())
    assert "maxReplicas\t<integer> -required-" in said
    said = " ".join(space.kubectl("explain", "fgd.spec.autoscaling.minReplicas").split())
    assert "Lower bound for the number of replicas. 0 requires spec.gateway.expose" in said


@pytest.mark.controlplane
def test_wait_scale_and_rollout_status_work_as_on_a_deployment(space: Space, operator: OperatorProcess) -> None:
    del operator
    space.apply(resource())
    with pytest.raises(CommandError, match="timed out waiting for the condition"):
        space.kubectl("wait", "fgd/chat", "--for=condition=Ready", "--timeout=1s")
    space.make_ready()
    assert "condition met" in space.kubectl("wait", "fgd/chat", "--for=condition=Ready", "--timeout=100s")
    assert "successfully rolled out" in space.kubectl("rollout", "status", "deployment/chat", "--timeout=100s")
    assert "replicas" not in space.get("fgd", "chat")["spec"], "an unset spec.replicas means one replica"
    # kubectl scale sets spec.replicas although it was unset; a HorizontalPodAutoscaler needs an initial value.
    space.kubectl("scale", "fgd/chat", "--replicas=2")
    space.make_ready(count=2)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    assert space.get("fgd", "chat")["status"]["desiredReplicas"] == 2


@pytest.mark.controlplane
def test_manual_scaling_is_rejected_under_autoscaling_with_the_remedy(space: Space, operator: OperatorProcess) -> None:
    del operator
    space.apply(resource(autoscaling=AUTOSCALING))
    space.wait_pods(1)
    with pytest.raises(CommandError) as refused:
        space.kubectl("scale", "fgd/chat", "--replicas=2")
    assert "spec.replicas and spec.autoscaling are mutually exclusive" in str(refused.value)
    assert "set spec.autoscaling.minReplicas and maxReplicas" in str(refused.value)
    space.patch("fgd/chat", {"spec": {"autoscaling": {"minReplicas": 2}}})
    space.wait_pods(2)


@pytest.mark.controlplane
def test_a_cache_can_grow_and_is_otherwise_immutable(space: Space) -> None:
    space.apply(resource(model={"source": "hf://owner/name"}, cache={"size": "1Gi"}, replicas=0))
    space.patch("fgd/chat", {"spec": {"cache": {"size": "1536Mi"}}})
    refusals = {
        "size": ("1Gi", "spec.cache.size can only grow"),
        "storageClassName": ("other", "spec.cache.storageClassName and spec.cache.accessMode are immutable"),
        "accessMode": ("ReadWriteMany", "spec.cache.storageClassName and spec.cache.accessMode are immutable"),
    }
    for field, (value, words) in refusals.items():
        with pytest.raises(KubeError) as refused:
            space.patch("fgd/chat", {"spec": {"cache": {field: value}}})
        assert words in str(refused.value), field
    space.patch("fgd/chat", {"spec": {"cache": None}})
    space.patch("fgd/chat", {"spec": {"cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}}})


@pytest.mark.controlplane
def test_switching_between_replicas_and_autoscaling_keeps_the_pods(space: Space, operator: OperatorProcess) -> None:
    del operator
    space.apply(resource(replicas=3))
    space.wait_pods(3)
    space.patch("fgd/chat", {"spec": {"replicas": None, "autoscaling": AUTOSCALING}})
    eventually(lambda: space.condition("ScalingActive"), within=20, what="the condition ScalingActive")
    assert len(space.pods()) == 3, "autoscaling starts from the existing replicas"
    space.patch("fgd/chat", {"spec": {"replicas": 1, "autoscaling": None}})
    space.wait_pods(1)
