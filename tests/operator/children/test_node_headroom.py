"""Placeholder pods: their manifest, what selects and counts them, and what the operator's credentials make of them."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.children import Children, build_children
from fastgen_operator.children.download_placement import requests
from fastgen_operator.children.platform import Platform
from fastgen_operator.children.pod_security import broken_rules
from fastgen_operator.children.template import build_template
from fastgen_operator.kinds import (
    DEPLOYMENT,
    FASTGEN,
    INFERENCE_POOL,
    NETWORK_POLICY,
    POD,
    POD_MONITOR,
    SERVICE,
    Object,
)
from fastgen_operator.kube.cache import InformerCache, owner_of
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import make_plan
from fastgen_operator.reconcile.observe import observe
from fastgen_operator.status.conditions.headroom_reserved import HEADROOM_RESERVED
from fastgen_operator.status.conditions.table import all_conditions
from harness.chart import CLUSTER_NAME
from harness.objects import UID, applied, desired_of, manifests, observed, pod, situation, stored
from harness.space import Space, resource
from harness.thief import POD_SPEC, changed, dry, thief_of
from support.waiting import HANG_SECONDS, eventually

CLASS = f"{CLUSTER_NAME}-headroom"
PLATFORM = Platform("engine:test", headroom_class=CLASS)
NAME = "chat-headroom"
OWNER = "fastgen.dev/deployment"
ASKED: Object = {"autoscaling": {"maxReplicas": 5, "nodeHeadroom": 2}}


def deployments(children: Children) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for kind, each in children if kind == DEPLOYMENT}


def both(platform: Platform = PLATFORM, **spec: Any) -> tuple[Object, Object]:
    """Return two pod templates: of the replicas, and of the placeholders."""
    found = deployments(manifests(stored(**ASKED, **spec), platform))
    return found["chat"]["spec"]["template"], found[NAME]["spec"]["template"]


SIDECAR: Object = {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}
EVERYWHERE: Object = {
    "model": {"source": "hf://owner/tiny", "download": {"resources": {"requests": {"memory": "64Gi"}}}},
    "engine": {"device": "cuda", "image": "mine:1"},
    "resources": {"gpu": {"count": 2}, "requests": {"cpu": 3, "memory": "8Gi"}, "limits": {"memory": "9Gi"}},
    "apiKeySecretName": "keys",
    "scheduling": {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    },
    "podTemplate": {
        "metadata": {"labels": {"app": "mine"}},
        "spec": {
            "schedulerName": "other",
            "initContainers": [
                {"name": "side", "image": "side:1", "restartPolicy": "Always", **SIDECAR},
                {"name": "once", "image": "once:1", "resources": {"requests": {"cpu": "9"}}, **SIDECAR},
            ],
            "containers": [
                {"name": "proxy", "image": "proxy:1", "resources": {"requests": {"cpu": "500m"}}, **SIDECAR},
                {"name": "engine", "volumeMounts": [{"name": "weights", "mountPath": "/weights", "readOnly": True}]},
            ],
            "volumes": [{"name": "weights", "image": {"reference": "weights:1"}}],
            "imagePullSecrets": [{"name": "registry"}],
        },
    },
}


def test_a_placeholder_has_the_requests_and_the_placement_of_a_replica() -> None:
    replica, placeholder = (template["spec"] for template in both(**EVERYWHERE))
    assert requests(placeholder) == requests(replica)
    assert requests(placeholder)["nvidia.com/gpu"] == 2
    assert requests(placeholder)["cpu"] == 9, "of the init container"
    placed = ("nodeSelector", "tolerations", "affinity", "runtimeClassName", "schedulerName")
    for field in (*placed, "imagePullSecrets", "serviceAccountName"):
        assert placeholder[field] == replica[field], field
    limits = {each["name"]: each.get("resources", {}).get("limits") for each in placeholder["containers"]}
    assert limits == {each["name"]: each.get("resources", {}).get("limits") for each in replica["containers"]}
    (side,) = (each for each in placeholder["initContainers"] if each["name"] == "side")
    assert side["restartPolicy"] == "Always"


def test_its_node_pulls_the_engines_image_and_the_images_of_volumes() -> None:
    _, placeholder = both(**EVERYWHERE)
    pod = placeholder["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    assert {each["image"] for each in containers} == {"mine:1"}
    assert pod["volumes"] == [{"name": "weights", "image": {"reference": "weights:1"}}]
    mounts = {each["name"]: each.get("volumeMounts") for each in containers}
    assert mounts.pop("engine") == [{"name": "weights", "mountPath": "/weights", "readOnly": True}]
    assert set(mounts.values()) == {None}
    model = "registry.example/smollm2:1"
    replica, placeholder = (each["spec"] for each in both(model={"source": f"oci://{model}"}))
    (volume,) = placeholder["volumes"]
    assert volume["image"] == {"reference": model}
    assert volume in replica["volumes"]


def test_it_gets_no_secret_no_token_and_no_port_and_is_restricted() -> None:
    _, placeholder = both(**EVERYWHERE)
    pod = placeholder["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert broken_rules(placeholder) == ()
    allowed = {"name", "image", "imagePullPolicy", "command", "resources", "securityContext", "volumeMounts"}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container.keys() - {"restartPolicy"} <= allowed
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_it_has_the_class_of_placeholders_and_does_not_delay_who_preempts_it() -> None:
    _, placeholder = both(**EVERYWHERE)
    assert placeholder["spec"]["priorityClassName"] == CLASS
    assert placeholder["spec"]["terminationGracePeriodSeconds"] == 1


def test_its_containers_wait_and_end_at_once_when_asked() -> None:
    pod = both(**EVERYWHERE)[1]["spec"]
    waiting = [each["command"] for each in pod["containers"]]
    waiting += [each["command"] for each in pod["initContainers"] if "restartPolicy" in each]
    assert len({tuple(command) for command in waiting}) == 1
    first = [each["command"] for each in pod["initContainers"] if "restartPolicy" not in each]
    for command in first:
        subprocess.run([sys.executable, *command[1:]], check=True, timeout=HANG_SECONDS)
    with subprocess.Popen([sys.executable, *waiting[0][1:]], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "holding room for a replica\n"
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_SECONDS) == 0
        finally:
            process.kill()


def test_nothing_that_selects_replicas_selects_placeholders() -> None:
    everything = replace(
        PLATFORM, optional_kinds=frozenset({POD_MONITOR, INFERENCE_POOL}), has_gateway=True, pickers=("10.0.0.1",)
    )
    spec = {**EVERYWHERE, "gateway": {"expose": True}, "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}}
    made = manifests(stored(**ASKED, **spec), everything)
    selectors = [selector_of(each) for _, each in made if each["metadata"]["name"] != NAME]
    found = [each for each in selectors if each]
    assert len(found) >= 6
    (labels,) = (each["spec"]["template"]["metadata"]["labels"] for _, each in made if each["metadata"]["name"] == NAME)
    assert [each for each in found if each.items() <= labels.items()] == []
    assert "app" not in labels, "by which the user's own Service may select replicas"
    assert labels["app.kubernetes.io/name"] != "fastgen-engine"
    assert len(labels[OWNER]) <= 63


def selector_of(child: Object) -> Mapping[str, str]:
    spec = child.get("spec", {})
    selector = spec.get("selector") or spec.get("podSelector") or {}
    found: Mapping[str, str] = selector.get("matchLabels", selector if child["kind"] == SERVICE.name else {})
    return found


def test_placeholders_do_not_count_as_replicas_in_the_cache() -> None:
    cache, owner = InformerCache(), stored(**ASKED)
    cache.put(FASTGEN, owner)
    for number, label in enumerate(("chat", "chat_headroom"), start=2):
        made = pod(name=str(number))
        metadata = {**made["metadata"], "namespace": "space", "resourceVersion": str(number), "labels": {OWNER: label}}
        cache.put(POD, {**made, "metadata": metadata})
        assert owner_of(POD, {"metadata": metadata}) == ("space", "chat")
    seen = observe(cache, ("space", "chat"), PLATFORM.kinds, None)
    assert seen is not None
    assert [each.name for each in seen.pods] == ["chat-new-2"]
    assert (seen.canary_pods, seen.fetch_pods) == ((), ())


@pytest.mark.parametrize(
    ("platform", "spec"),
    [
        (replace(PLATFORM, headroom_class=""), ASKED),
        (PLATFORM, {"autoscaling": {"maxReplicas": 5}}),
        (PLATFORM, {"autoscaling": {"maxReplicas": 5, "nodeHeadroom": 0}}),
        (PLATFORM, {"replicas": 2}),
    ],
    ids=["no class", "unset", "zero", "not autoscaled"],
)
def test_there_are_none_unless_asked_for_and_possible(platform: Platform, spec: Object) -> None:
    owner = stored(**spec)
    assert deployments(manifests(owner, platform)).keys() == {"chat"}
    made = applied(deployments(manifests(stored(**ASKED), PLATFORM))[NAME], resourceVersion="1")
    plan = make_plan(situation(Observed(owner, {(DEPLOYMENT, NAME): made})), platform)
    assert [(each.kind, each.child["metadata"]["name"]) for each in plan.deletes] == [(DEPLOYMENT, NAME)]


@pytest.mark.parametrize(("replicas", "number"), [(0, 2), (1, 2), (3, 2), (4, 1), (5, 0), (6, 0)])
def test_there_are_no_more_than_can_become_replicas(replicas: int, number: int) -> None:
    found = deployments(manifests(stored(**ASKED), PLATFORM, replicas=replicas))
    assert found[NAME]["spec"]["replicas"] == number


def test_a_new_template_replaces_them_without_further_pods_and_they_may_wait_forever() -> None:
    spec = deployments(manifests(stored(**ASKED), PLATFORM))[NAME]["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": "100%"}
    assert spec["progressDeadlineSeconds"] == 2**31 - 1


def test_they_have_the_template_of_the_deployment_not_of_a_revision_that_waits() -> None:
    desired = desired_of(stored(**ASKED, resources={"requests": {"cpu": 1}}), PLATFORM)
    held = copy.deepcopy(build_template(desired))
    held["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "7"}}
    found = deployments(build_children(desired, held, held_revision="old"))[NAME]
    assert requests(found["spec"]["template"]["spec"])["cpu"] == 7
    assert NAME not in deployments(build_children(desired, None)), "before the first replica"


def test_claims_of_devices_are_left_out() -> None:
    desired = desired_of(stored(**ASKED), PLATFORM)
    held = copy.deepcopy(build_template(desired))
    held["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "gpu"}]
    held["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}], "limits": {"memory": "1Gi"}}
    pod = deployments(build_children(desired, held))[NAME]["spec"]["template"]["spec"]
    assert "resourceClaims" not in pod
    assert pod["containers"][0]["resources"] == {"limits": {"memory": "1Gi"}}


def test_they_are_spread_as_further_replicas_would_be() -> None:
    own = {"labelSelector": {"matchLabels": {"app": "mine"}}, "topologyKey": "rack", "maxSkew": 1}
    own["whenUnsatisfiable"] = "DoNotSchedule"
    patch = {"spec": {"topologySpreadConstraints": [own]}}
    spec = {"scheduling": {"topologySpreadConstraints": [{"topologyKey": "zone"}]}, "podTemplate": patch}
    replica, placeholder = (each["spec"]["topologySpreadConstraints"] for each in both(**spec))
    assert own in replica
    assert own in placeholder
    (zone,) = (each for each in placeholder if each["topologyKey"] == "zone")
    (expression,) = zone["labelSelector"]["matchExpressions"]
    assert expression == {"key": OWNER, "operator": "In", "values": ["chat", "chat_headroom"]}
    assert "matchLabelKeys" not in zone, "placeholders have another template"


def test_an_orphaned_deployment_of_placeholders_is_adopted() -> None:
    owner = stored(**ASKED)
    orphan = applied(deployments(manifests(owner, PLATFORM))[NAME], resourceVersion="1", uid="x")
    orphan["metadata"]["ownerReferences"] = []
    plan = make_plan(situation(Observed(owner, {(DEPLOYMENT, NAME): orphan})), PLATFORM)
    assert [each.child["metadata"]["name"] for each in plan.adopts] == [NAME]


def test_a_deployment_of_another_owner_is_not_taken_over() -> None:
    owner = stored(**ASKED)
    theirs = {"metadata": {"name": NAME, "namespace": "space", "uid": "theirs", "resourceVersion": "1"}, "spec": {}}
    plan = make_plan(situation(Observed(owner, {(DEPLOYMENT, NAME): theirs})), PLATFORM)
    assert plan.problem is not None
    assert (plan.problem.reason, NAME in plan.problem.message) == ("NameTaken", True)
    assert NAME not in [each.name for each in plan.applies]


def conditions(spec: Object = ASKED, *, has_class: bool = True, replicas: int = 2, **status: Any) -> dict[str, Any]:
    """Return the conditions of a resource that serves; `replicas` and `status` are those of the placeholders."""
    owner = stored(**spec)
    seen = observed(pod(ready=True), owner=owner, observedGeneration=7, replicas=1, updatedReplicas=1)
    made = {
        "metadata": {"name": NAME, "generation": 3, "ownerReferences": [{"uid": UID, "controller": True}]},
        "spec": {"replicas": replicas},
        "status": {"observedGeneration": 3, **status},
    }
    found = situation(seen.with_child(DEPLOYMENT, made), has_headroom_class=has_class)
    return all_conditions(found, None)


REFUSED: Object = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]}


@pytest.mark.parametrize(
    ("facts", "status", "reason", "words"),
    [
        ({"availableReplicas": 2}, "True", "Reserved", "2 placeholder pods"),
        ({"availableReplicas": 1}, "False", "WaitingForNodes", "1 of 2 placeholder pods"),
        ({}, "False", "WaitingForNodes", "0 of 2 placeholder pods"),
        (REFUSED, "False", "PlaceholdersRejected", "exceeded quota"),
        ({"has_class": False}, "False", "NoPriorityClass", "headroom.enabled"),
        ({"observedGeneration": 2}, "Unknown", "NotObserved", ""),
        ({"replicas": 1}, "Unknown", "NotObserved", ""),
    ],
)
def test_a_condition_says_whether_they_hold_room_and_no_other_depends_on_it(
    facts: Object, status: str, reason: str, words: str
) -> None:
    found = conditions(**facts)
    own = found.pop(HEADROOM_RESERVED)
    assert (own.status, own.reason) == (status, reason)
    assert words in own.message
    without = conditions({"autoscaling": {"maxReplicas": 5}}, **facts)
    assert HEADROOM_RESERVED not in without, "omitted"
    assert found == without


def test_none_are_missing_when_as_many_replicas_as_allowed_are_desired() -> None:
    found = conditions({"autoscaling": {"minReplicas": 5, "maxReplicas": 5, "nodeHeadroom": 2}}, replicas=0)
    assert (found[HEADROOM_RESERVED].status, found[HEADROOM_RESERVED].reason) == ("True", "Reserved")
    assert "none is needed" in found[HEADROOM_RESERVED].message


@pytest.mark.controlplane
@pytest.mark.usefixtures("unattended")
def test_the_operators_credentials_give_the_class_to_placeholders_only(plane: ControlPlane, space: Space) -> None:
    thief = thief_of(plane)
    space.apply(resource(**ASKED))
    found = deployments(manifests(space.get("fgd", "chat"), PLATFORM))
    placeholders, replicas = found[NAME], found["chat"]
    eventually(lambda: dry(thief, DEPLOYMENT, placeholders) == "", within=20, what="the right to make placeholders")
    selector, label = ("spec", "selector", "matchLabels"), ("spec", "template", "metadata", "labels", OWNER)
    serving = changed(changed(placeholders, selector, {OWNER: "chat"}), label, "chat")
    moved = changed(changed(replicas, selector, {OWNER: "chat_headroom"}), label, "chat_headroom")
    theirs = changed(changed(placeholders, selector, {OWNER: "other_headroom"}), label, "other_headroom")
    one = "placeholder pods with their PriorityClass"
    # Of two policies that reject a class, the API server names either.
    classes = "placeholder pods with their PriorityClass|does not name the priorityClassName"
    for manifest, pattern in (
        (changed(placeholders, (*POD_SPEC, "priorityClassName"), "system-node-critical"), classes),
        (changed(placeholders, (*POD_SPEC, "priorityClassName"), None), one),
        (changed(replicas, (*POD_SPEC, "priorityClassName"), CLASS), "does not name the priorityClassName"),
        (serving, one),
        (moved, one),
        (theirs, "select and create pods"),
    ):
        words = dry(thief, DEPLOYMENT, manifest)
        assert any(part in words for part in pattern.split("|")), (pattern, words)
    # The other policy allows a class that the spec names, so only one of them can reject what follows.
    space.patch("fgd/chat", {"spec": {"scheduling": {"priorityClassName": CLASS}}})
    allowed = changed(replicas, (*POD_SPEC, "priorityClassName"), CLASS)
    eventually(lambda: dry(thief, DEPLOYMENT, allowed) == "", within=20, what="the right to use the class of the spec")
    assert one in dry(thief, DEPLOYMENT, changed(placeholders, ("metadata", "name"), "chat"))
    assert "with the name of" in dry(thief, DEPLOYMENT, changed(placeholders, ("metadata", "name"), "other-headroom"))
    made = dict(manifests(space.get("fgd", "chat")))
    service = changed(made[SERVICE], ("spec", "selector"), {OWNER: "chat_headroom"})
    assert "select and create pods" in dry(thief, SERVICE, service)
    assert "with the name of" in dry(thief, SERVICE, changed(made[SERVICE], ("metadata", "name"), NAME))
    policy = changed(made[NETWORK_POLICY], ("spec", "podSelector", "matchLabels"), {OWNER: "chat_headroom"})
    assert "select and create pods" in dry(thief, NETWORK_POLICY, policy)
