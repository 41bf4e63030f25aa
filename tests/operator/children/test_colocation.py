"""Pods that mount a ReadWriteOnce volume require one node, and keep the affinity that the user asks for."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen_operator.children.platform import Platform
from fastgen_operator.children.pod_security import broken_rules
from fastgen_operator.children.template import TemplateRefused
from fastgen_operator.kinds import DEPLOYMENT, POD, Object
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import make_plan
from fastgen_operator.plan.rollout import pods_to_replace
from harness.objects import applied, leaving, manifest, pod, pod_template, situation, stored

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
HUB: Object = {"source": "hf://owner/tiny"}
NO_ROOM = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match pod affinity rules"
IN_ZONE: Object = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}
NEAR_REDIS: Object = {"labelSelector": {"matchLabels": {"app": "redis"}}, "topologyKey": "zone"}


def cached(access_mode: str = "ReadWriteOnce", **spec: Any) -> Object:
    """Return a resource whose model is cached in a volume with this access mode."""
    return stored(model=HUB, cache={"size": "1Gi", "accessMode": access_mode}, **spec)


def affinity_of(owner: Object) -> Object:
    """Return the affinity of the resource's pods."""
    found: Object = pod_template(owner)["spec"]["affinity"]
    return found


def test_all_pods_of_a_read_write_once_volume_require_one_node() -> None:
    (term,) = affinity_of(cached())["podAffinity"][REQUIRED]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    (selected,) = term["labelSelector"]["matchExpressions"]
    assert (selected["key"], selected["operator"]) == (OWNER_LABEL, "In")
    # The download has another label. Each pod matches its own term, so that the first one can run.
    assert selected["values"] == ["chat", "chat_fetch"]


@pytest.mark.parametrize(
    "owner",
    [cached("ReadWriteMany"), stored(model=HUB), stored(), stored(model={"source": "pvc://mine/a.gguf"})],
    ids=["ReadWriteMany", "no volume", "in the image", "own claim"],
)
def test_other_pods_may_run_on_any_node(owner: Object) -> None:
    assert "affinity" not in pod_template(owner)["spec"]


@pytest.mark.parametrize("place", ["scheduling", "podTemplate", "both"])
def test_the_affinity_of_the_spec_is_kept(place: str) -> None:
    mine: Object = {
        "nodeAffinity": {REQUIRED: IN_ZONE},
        "podAffinity": {PREFERRED: [{"weight": 1, "podAffinityTerm": NEAR_REDIS}]},
        "podAntiAffinity": {REQUIRED: [NEAR_REDIS]},
    }
    owners = {
        "scheduling": cached(scheduling={"affinity": mine}),
        "podTemplate": cached(podTemplate={"spec": {"affinity": mine}}),
        "both": cached(
            scheduling={"affinity": {"nodeAffinity": mine["nodeAffinity"]}},
            podTemplate={"spec": {"affinity": {**mine, "nodeAffinity": {}}}},
        ),
    }
    before = str(owners[place])
    affinity = affinity_of(owners[place])
    assert len(affinity["podAffinity"].pop(REQUIRED)) == 1
    assert affinity == mine
    assert str(owners[place]) == before, "the resource is shared with other readers"


def test_a_patch_that_deletes_the_affinity_does_not_delete_the_co_location() -> None:
    assert affinity_of(cached(podTemplate={"spec": {"affinity": None}}))["podAffinity"][REQUIRED]


REFUSED: dict[str, tuple[Object, str]] = {
    # The scheduler looks for one pod that matches all required terms.
    "another required pod": ({"podAffinity": {REQUIRED: [NEAR_REDIS]}}, f"affinity.podAffinity.{REQUIRED}: must not"),
    "no map": ({"podAffinity": "near"}, "affinity.podAffinity: must be a map"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_affinity_that_excludes_co_location_is_refused_by_its_field(case: str) -> None:
    affinity, words = REFUSED[case]
    with pytest.raises(TemplateRefused, match=r"spec\.scheduling\.affinity") as refused:
        affinity_of(cached(scheduling={"affinity": affinity}))
    assert words in str(refused.value)
    with pytest.raises(TemplateRefused, match=r"spec\.podTemplate\.spec\.affinity"):
        affinity_of(cached(podTemplate={"spec": {"affinity": affinity}}))
    affinity_of(stored(scheduling={"affinity": affinity}))


def test_a_refused_affinity_is_a_problem_and_the_pods_stay() -> None:
    affinity, _ = REFUSED["another required pod"]
    fine = cached(replicas=1)
    live = applied(manifest(DEPLOYMENT, fine), generation=1)
    owner = cached(replicas=3, scheduling={"affinity": affinity})
    seen = Observed(owner, {(DEPLOYMENT, "chat"): live})
    plan = make_plan(situation(seen), Platform("engine:test"))
    assert plan.problem is not None
    assert plan.problem.reason == "PodTemplateRefused"
    (apply,) = [apply for apply in plan.applies if apply.kind == DEPLOYMENT]
    assert apply.manifest["spec"]["replicas"] == 3
    assert apply.manifest["spec"]["template"] == live["spec"]["template"]


def on(node: str, name: str = "x", **more: Any) -> Object:
    found = pod(name=name, **more)
    return {**found, "spec": {**found["spec"], "nodeName": node}}


WAITING = pod(name="w", scheduled=NO_ROOM)


@pytest.mark.parametrize(
    ("pods", "nodes", "waiting"),
    [
        ([], (), 0),
        # The first pod may run on any node, so it lacks something else.
        ([WAITING], (), 0),
        ([on("n1"), WAITING], ("n1",), 1),
        ([on("n1"), pod(name="w", scheduled="")], ("n1",), 0),
        ([on("n1", phase="Succeeded"), WAITING], (), 0),
        ([leaving(on("n1")), WAITING], ("n1",), 0),
        ([on("n1"), leaving(on("n1", "y")), WAITING], ("n1",), 0),
        ([on("n2"), on("n1", "y"), leaving(WAITING)], ("n1", "n2"), 0),
    ],
)
def test_pods_without_room_are_those_that_the_node_of_the_volume_does_not_accept(
    pods: list[Object], nodes: tuple[str, ...], waiting: int
) -> None:
    for access_mode, expected, without_room in (("ReadWriteOnce", nodes, waiting), ("ReadWriteMany", (), 0)):
        seen = situation(Observed(cached(access_mode), pods=tuple(map(Pod, pods))))
        assert seen.volume_nodes(seen.observed.pods) == expected
        assert seen.pods_without_room == without_room


LIMITED: Object = {"conditions": [{"type": "ScalingLimited", "status": "True", "reason": "VolumeOnOneNode"}]}
WAITED: Object = {"conditions": [{"type": "PodsScheduled", "status": "False", "reason": "VolumeOnOneNode"}]}


@pytest.mark.parametrize(
    ("pods", "status", "access_mode", "replaced"),
    [
        ([WAITING], WAITED, "ReadWriteOnce", ["chat-new-w"]),
        # The status that follows does not say it any more.
        ([WAITING], {}, "ReadWriteOnce", []),
        ([WAITING], LIMITED, "ReadWriteOnce", []),
        ([leaving(on("n1")), WAITING], WAITED, "ReadWriteOnce", []),
        ([on("n1", phase="Failed"), WAITING], WAITED, "ReadWriteOnce", ["chat-new-w"]),
        ([pod(name="w", scheduled="")], WAITED, "ReadWriteOnce", []),
        ([leaving(WAITING)], WAITED, "ReadWriteOnce", []),
        ([WAITING], WAITED, "ReadWriteMany", []),
    ],
)
def test_pods_that_wait_for_a_node_that_the_volume_has_left_are_replaced_once(
    pods: list[Object], status: Object, access_mode: str, replaced: list[str]
) -> None:
    owner = {**cached(access_mode, replicas=2), "status": status}
    seen = Observed(owner, pods=tuple(map(Pod, pods)))
    deletes = make_plan(situation(seen), Platform("engine:test")).deletes
    assert [delete.child["metadata"]["name"] for delete in deletes if delete.kind == POD] == replaced


def test_a_waiting_download_is_replaced_like_a_replica() -> None:
    owner = {
        **cached(),
        "status": {"conditions": [{"type": "ModelCached", "status": "False", "reason": "VolumeOnOneNode"}]},
    }
    assert pods_to_replace(situation(Observed(owner, fetch_pods=(Pod(WAITING),)))) == (Pod(WAITING),)
    assert pods_to_replace(situation(Observed(owner, pods=(Pod(on("n1")),), fetch_pods=(Pod(WAITING),)))) == ()


def test_a_claim_of_many_readers_is_mounted_read_only_by_a_patch() -> None:
    """The recipe in docs/guide.md."""
    patch = {"volumes": [{"name": "models", "persistentVolumeClaim": {"readOnly": True}}]}
    owner = stored(model={"source": "pvc://mine/a.gguf"}, podTemplate={"spec": patch})
    template = pod_template(owner)["spec"]
    (volume,) = [each for each in template["volumes"] if each["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "mine", "readOnly": True}


def test_a_model_in_an_image_volume_needs_no_field_of_its_own() -> None:
    """For example with a pull policy of its own: an oci:// source has the default one."""
    volume: Object = {"name": "weights", "image": {"reference": "registry.example/smollm2:1"}}
    mount: Object = {"name": "weights", "mountPath": "/weights", "readOnly": True}
    patch = {"volumes": [volume], "containers": [{"name": "engine", "volumeMounts": [mount]}]}
    owner = stored(model={"source": "file:///weights/smollm2.gguf"}, podTemplate={"spec": patch})
    template = pod_template(owner)["spec"]
    (engine,) = template["containers"]
    assert engine["args"][:2] == ["serve", "/weights/smollm2.gguf"]
    assert volume in template["volumes"]
    assert mount in engine["volumeMounts"]
    assert not broken_rules({"spec": template})
