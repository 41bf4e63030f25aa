"""Objects that a tenant nests too deeply or makes too large are reported, and stop nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plugin.main import main as plugin
from harness.hostile import create, deep, refusal, without_limits
from harness.process import OperatorProcess
from harness.space import Space, resource

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

DEPTHS = (100, 700, 1500, 3000, 9000)


def scale(space: Space, replicas: int, *, others: int = 0) -> None:
    space.patch("fgd/chat", {"spec": {"replicas": replicas}})
    space.make_ready(count=replicas + others)
    space.wait_condition("Ready", "True", "AllReplicasReady")


def test_resources_of_any_depth_are_reported_and_stop_nothing_else(
    plane: ControlPlane, space: Space, own_operator: OperatorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    space.apply(resource())
    scale(space, 1)
    names = [f"{shape}-{depth}" for shape in ("map", "list") for depth in DEPTHS]
    with without_limits(space):
        for name in names:
            shape, _, depth = name.partition("-")
            create(space, name, deep(int(depth), shape))
        for name in names:
            words = space.wait_condition("Ready", "False", "InvalidSpec", name)["message"]
            assert words.startswith("spec.podTemplate.spec.a.…: nested more than 32 levels deep: flatten or remove it")
        scale(space, 2)
        assert own_operator.stop() == 0
        own_operator.start()
        scale(space, 1)
        space.patch("fgd/chat", {"spec": {"podTemplate": {"spec": json.loads(deep(100))}}})
        space.wait_condition("Ready", "False", "InvalidSpec")
        assert space.condition("Available")["status"] != "True", "unknown, not lost"
        assert space.get("deployment", "chat")["spec"]["replicas"] == 1, "the pods stay as they are"
        assert len(space.pods()) == 1
        space.patch("fgd/chat", {"spec": {"podTemplate": None}})
        space.wait_condition("Ready", "True", "AllReplicasReady")
        kubeconfig = ("--kubeconfig", str(plane.kubeconfig), "--namespace", space.name)
        assert plugin(["status", *kubeconfig]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in [*names, "chat"])
        assert plugin(["status", "map-9000", *kubeconfig]) == 0
        assert "InvalidSpec" in capsys.readouterr().out
        space.patch("fgd/map-9000", {"spec": {"podTemplate": None}})
        space.wait_condition("Ready", "True", None, "map-9000")
    assert own_operator.is_healthy()
    assert "Traceback" not in own_operator.log.read_text()


def test_admission_rejects_what_the_operator_could_not_use_and_names_the_field(
    space: Space,
) -> None:
    # The resource, its spec, podTemplate and podTemplate.spec are four levels.
    for shape in ("map", "list"):
        assert refusal(space, "x", deep(29, shape)) == ""
        for depth in (30, *DEPTHS):
            assert "spec: is nested more than 32 levels deep" in refusal(space, "x", deep(depth, shape))
    frame = len('{"metadata":{}, "spec":{"a":""}}')
    assert refusal(space, "x", json.dumps({"a": "x" * (65536 - frame)})) == ""
    for characters in (65537 - frame, 1_400_000):
        words = refusal(space, "x", json.dumps({"a": "x" * characters}))
        assert f"spec.podTemplate: has {characters + frame} characters, above 65536" in words
    for items in ([0] * 1001, {str(number): 0 for number in range(1001)}):
        assert "has a list or map of more than 1000 items" in refusal(space, "x", json.dumps({"a": items}))
    assert "above 65536" in refusal(space, "x", json.dumps({"a": [0] * 300_000})), "without iterating over it"
    spread = [{"key": f"k{n}", "operator": "In", "values": ["v" * 63] * 900} for n in range(3)]
    body: Any = resource(scheduling={"affinity": {"nodeAffinity": {"x": spread}}})
    with pytest.raises(Exception, match=r"spec: has .* characters, above 131072"):
        space.apply(body, "--dry-run=server")


def test_what_was_stored_before_the_limits_keeps_its_spec_and_can_be_labelled_scaled_and_deleted(space: Space) -> None:
    with without_limits(space):
        create(space, "chat", deep(100))
    space.patch("fgd/chat", {"metadata": {"labels": {"team": "search"}}})
    space.kubectl("scale", "fgd/chat", "--replicas=2")
    with pytest.raises(KubeError, match="spec: is nested more than 32 levels deep"):
        space.patch("fgd/chat", {"spec": {"drainSeconds": 5}})
    space.kubectl("delete", "fgd/chat")


def test_children_with_large_metadata_and_large_pods_of_others_stop_nothing(
    space: Space, own_operator: OperatorProcess
) -> None:
    space.apply(resource())
    scale(space, 1)
    large = {"example.com/note": "x" * 200_000}
    for kind in ("deployment", "service", "networkpolicy"):
        space.patch(f"{kind}/chat", {"metadata": {"annotations": large, "finalizers": None}})
    space.patch("fgd/chat", {"metadata": {"annotations": large}})
    (pod,) = space.pods()
    intruder = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "intruder", "labels": {"fastgen.dev/deployment": "chat", "pod-template-hash": "none"}},
        "spec": {**pod["spec"], "containers": [], "volumes": [], "initContainers": []},
    }
    engine = next(each for each in pod["spec"]["containers"] if each["name"] == "engine")
    plain = {name: engine[name] for name in ("image", "securityContext")}
    intruder["spec"]["containers"] = [{**plain, "name": f"c{number}-{'x' * 50}"} for number in range(900)]
    for name in ("serviceAccountName", "serviceAccount"):
        intruder["spec"].pop(name, None)
    space.kubectl("create", "--filename", "-", stdin=json.dumps(intruder))
    scale(space, 2, others=1)
    assert own_operator.stop() == 0
    own_operator.start()
    scale(space, 1, others=1)
    assert own_operator.is_healthy()
    assert "Traceback" not in own_operator.log.read_text()


def test_a_deployment_that_is_too_large_to_be_read_is_named_and_left_alone(
    space: Space, own_operator: OperatorProcess
) -> None:
    space.apply(resource())
    scale(space, 1)
    variables = [{"name": f"v{number}", "value": "x" * 100_000} for number in range(11)]
    pod = {"containers": [{"name": "engine", "env": variables}]}
    body = {"spec": {"paused": True, "template": {"spec": pod}}}
    own_operator.stop()
    space.kubectl("patch", "deployment", "chat", "--patch-file", "/dev/stdin", stdin=json.dumps(body))
    own_operator.start()
    words = space.wait_condition("Ready", "False", "UnreadableChild")["message"]
    assert words.startswith("the Deployment chat cannot be read: spec.template.spec.containers.")
    assert "KiB, above 1024 KiB: shorten it, or delete the Deployment" in words
    space.apply(resource("other"))
    space.make_ready("other")
    space.wait_condition("Ready", "True", "AllReplicasReady", "other")
    space.kubectl("delete", "deployment", "chat")
    space.finish_rollout()
    space.wait_condition("Ready", "True", "AllReplicasReady")
