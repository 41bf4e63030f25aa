"""spec.podTemplate: merged strategically, rejected if it breaks the engine, and checked for Pod Security."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.commands import CommandError
from fastgen_operator.children.pod_security import broken_rules
from fastgen_operator.children.template import TemplateRefused, build_template, explain_refusal
from fastgen_operator.kinds import Object
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.status.conditions.pods_restricted import PODS_RESTRICTED
from fastgen_operator.status.conditions.table import all_conditions
from harness.insecure import INSECURE, context, of_engine
from harness.objects import ANY_TEMPLATE, desired_of, observed, pod, situation, spec_of, stored
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.waiting import eventually

SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
UNSAFE = {"spec": {"containers": [{"name": "proxy", "image": "proxy:1"}]}}
SIDECAR = {"name": "proxy", "image": "proxy:1", "securityContext": SAFE}


def template(**pod_template: Any) -> Object:
    return build_template(desired_of(stored(podTemplate=pod_template), ANY_TEMPLATE))


def merged(**patch: Any) -> Object:
    spec: Object = template(spec=patch)["spec"]
    return spec


def engine_of(spec: Object) -> Object:
    (engine,) = [container for container in spec["containers"] if container["name"] == "engine"]
    return dict(engine)


PLAIN = merged()

REFUSED: dict[str, tuple[Object, str]] = {
    "an item without a name": ({"containers": [{"image": "a"}]}, "containers[0]: each item needs its merge key name"),
    "a map in place of a list": ({"containers": {"name": "engine"}}, "containers: must be a list"),
    "a scalar in place of a map": ({"securityContext": "none"}, "securityContext: must be a map"),
    "an unknown directive": ({"$setElementOrder/containers": []}, "unknown directive"),
    "an unknown action": ({"securityContext": {"$patch": "drop"}}, "must be replace, delete or merge"),
    "a replaced item": ({"containers": [{"name": "engine", "$patch": "replace"}]}, "must be an item of its own"),
    "no engine": (
        {"containers": [{"name": "engine", "$patch": "delete"}]},
        "the container engine must not be removed",
    ),
    "other containers": ({"containers": [{"$patch": "replace"}, {"name": "a"}]}, "must not be removed"),
    "no containers": ({"containers": None}, "must not be removed"),
    "another command": (
        {"containers": [{"name": "engine", "command": ["sh"]}]},
        "containers[engine].command: must not be set",
    ),
    "other arguments": ({"containers": [{"name": "engine", "args": ["x"]}]}, "use spec.engine.extraArgs"),
    "another port": (
        {"containers": [{"name": "engine", "ports": [{"containerPort": 8000, "name": "x"}]}]},
        "port http",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_breaks_the_engine_is_rejected_with_the_field_and_the_remedy(case: str) -> None:
    patch, words = REFUSED[case]
    with pytest.raises(TemplateRefused) as refused:
        merged(**patch)
    assert str(refused.value).startswith("spec.podTemplate.spec")
    assert words in str(refused.value)


# Words of the API server about a Deployment, and the field that it names then.
TOO_MANY = 'Deployment.apps "chat" is invalid: spec.template.spec.{}: Invalid value: "x": not allowed'
TYPED = (
    "failed to create typed patch object (s/chat; apps/v1, Kind=Deployment): .spec.template.spec.{}: duplicate entries"
)
SCHEDULING: Object = {
    "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists", "value": "x"}],
    "topologySpreadConstraints": [{"topologyKey": "zone"}],
    "priorityClassName": "high",
    "runtimeClassName": "kata",
}
SOURCES: list[tuple[Object, str, str | None]] = [
    ({"scheduling": SCHEDULING}, TOO_MANY.format("tolerations[0].operator"), "spec.scheduling.tolerations[0].operator"),
    ({"scheduling": SCHEDULING}, TOO_MANY.format("nodeSelector"), "spec.scheduling.nodeSelector"),
    ({"scheduling": SCHEDULING}, TOO_MANY.format("priorityClassName"), "spec.scheduling.priorityClassName"),
    ({"scheduling": SCHEDULING}, TOO_MANY.format("runtimeClassName"), "spec.scheduling.runtimeClassName"),
    (
        {"scheduling": SCHEDULING},
        TYPED.format("topologySpreadConstraints"),
        "spec.scheduling.topologySpreadConstraints",
    ),
    # A template does not take the blame for fields that it does not have.
    (
        {"scheduling": SCHEDULING, "podTemplate": {"spec": {"hostname": "x"}}},
        TOO_MANY.format("nodeSelector"),
        "spec.scheduling.nodeSelector",
    ),
    (
        {"scheduling": SCHEDULING, "podTemplate": {"spec": {"nodeSelector": {"c": "d"}}}},
        TOO_MANY.format("nodeSelector"),
        "spec.podTemplate.spec.nodeSelector or spec.scheduling.nodeSelector",
    ),
    (
        {"engine": {"device": "cpu", "image": " a"}},
        TOO_MANY.format("containers[0].image"),
        "spec.engine.image",
    ),
    (
        {"resources": {"limits": {"gpus": 1}}},
        TOO_MANY.format("containers[0].resources.limits[gpus]"),
        "spec.resources.limits[gpus]",
    ),
    (
        {"model": {"source": "hf://a/b", "download": {"resources": {"limits": {"disk": 1}}}}},
        TOO_MANY.format("initContainers[0].resources.limits[disk]"),
        "spec.model.download.resources.limits[disk]",
    ),
    # The volume is missing because the template removes it.
    (
        {"podTemplate": {"spec": {"volumes": None}}},
        TOO_MANY.format("containers[0].volumeMounts[0].name"),
        "spec.podTemplate.spec.containers[0].volumeMounts[0].name",
    ),
    (
        {"podTemplate": {"spec": {"volumes": None}}},
        'Deployment.apps "chat" is invalid: spec.template.spec: Forbidden: no',
        "spec.podTemplate.spec",
    ),
    ({}, TOO_MANY.format("containers[0].image"), None),
    ({}, 'deployments.apps "chat" is forbidden: exceeded quota: none', None),
]


@pytest.mark.parametrize(("spec", "refusal", "field"), SOURCES)
def test_a_refusal_of_the_deployment_names_the_field_that_its_author_set(
    spec: Object, refusal: str, field: str | None
) -> None:
    found = explain_refusal(refusal, spec_of(stored(**spec)))
    if field is None:
        assert found is None
        return
    assert found is not None
    assert f"{field}: " in found, found
    assert "spec.template" not in found
    assert found.endswith(": correct or remove the field; the pods stay unchanged")


def test_an_empty_template_is_none() -> None:
    assert template() == template(spec={}) == build_template(desired_of(stored()))


def test_sidecars_variables_volumes_and_metadata_are_added() -> None:
    engine = {
        "name": "engine",
        "env": [{"name": "A", "value": "1"}],
        "volumeMounts": [{"name": "d", "mountPath": "/d"}],
    }
    made = template(
        metadata={"labels": {"team": "search"}, "annotations": {"note": "yes"}},
        spec={"containers": [SIDECAR, engine], "volumes": [{"name": "d", "emptyDir": {}}]},
    )
    assert made["metadata"]["labels"].items() > {"team": "search", "fastgen.dev/deployment": "chat"}.items()
    assert made["metadata"]["annotations"] == {**template()["metadata"]["annotations"], "note": "yes"}
    assert [container["name"] for container in made["spec"]["containers"]] == ["engine", "proxy"]
    changed = engine_of(made["spec"])
    assert changed["env"] == [*engine_of(PLAIN)["env"], {"name": "A", "value": "1"}]
    assert {"name": "d", "mountPath": "/d"} in changed["volumeMounts"]
    assert changed["securityContext"] == engine_of(PLAIN)["securityContext"]
    assert broken_rules(made) == ()


# What Python reads otherwise than the API server, which rejects all of it.
MISTYPED: list[Object] = [
    {"volumes": [{"name": "v", "hostPath": ["/"]}, 7]},
    {"securityContext": {"sysctls": [None]}},
    context(capabilities=["ALL"]),
    context(seccompProfile="RuntimeDefault"),
    of_engine(ports=[{"containerPort": 9}, "hostPort"]),
    of_engine(lifecycle={"preStop": "httpGet"}),
]


# The API server rejects these before admission runs: it does not allow privileged containers, and a process of a
# Windows host needs its network.
INVALID = ("a privileged engine", "a process of a Windows host")
VALID = {case: patch for case, (patch, _) in INSECURE.items() if case not in INVALID}


@pytest.mark.parametrize("case", INSECURE)
def test_a_violation_of_the_restricted_standard_is_reported_with_the_rule(case: str) -> None:
    patch, words = INSECURE[case]
    assert words in "; ".join(broken_rules(template(spec=patch)))
    owner = stored(podTemplate={"spec": patch})
    conditions = all_conditions(situation(observed(pod(), owner=owner)), None)
    assert (conditions[PODS_RESTRICTED].status, conditions[PODS_RESTRICTED].reason) == (
        "False",
        "PodTemplateNotRestricted",
    )
    assert words in conditions[PODS_RESTRICTED].message
    assert conditions["Ready"].reason != "PodTemplateNotRestricted"


@pytest.mark.parametrize("case", INSECURE)
def test_by_default_the_operator_refuses_what_violates_the_restricted_standard(case: str) -> None:
    patch, words = INSECURE[case]
    with pytest.raises(TemplateRefused) as refused:
        build_template(desired_of(stored(podTemplate={"spec": patch})))
    assert str(refused.value).startswith("spec.podTemplate: violates the restricted Pod Security Standard: ")
    assert words in str(refused.value)
    assert "podTemplate: any" in str(refused.value)


def test_by_default_an_unconfined_apparmor_annotation_is_refused() -> None:
    annotations = {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}
    with pytest.raises(TemplateRefused, match="must not be unconfined"):
        build_template(desired_of(stored(podTemplate={"metadata": {"annotations": annotations}})))


@pytest.mark.parametrize("patch", MISTYPED)
def test_a_value_of_the_wrong_type_never_passes_for_a_restricted_one(patch: Object) -> None:
    with pytest.raises(TemplateRefused, match=r"^spec\.podTemplate"):
        build_template(desired_of(stored(podTemplate={"spec": patch})))


def test_without_a_template_the_condition_is_absent() -> None:
    assert broken_rules(template()) == ()
    assert PODS_RESTRICTED not in all_conditions(situation(observed()), None)


@pytest.mark.controlplane
def test_pod_security_admission_rejects_the_same_pods(space: Space) -> None:
    """Kubernetes' admission plugin has the same verdict on each violation, and on restricted pods."""
    patches = [*VALID.values(), {}, {"containers": [SIDECAR]}]
    templates = {f"pod{number}": template(spec=patch) for number, patch in enumerate(patches)}
    pods = [
        {
            **{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}},
            "spec": {**made["spec"], "serviceAccountName": "default"},
        }
        for name, made in templates.items()
    ]
    eventually(lambda: space.items("serviceaccounts"), within=20, what="the default ServiceAccount")
    with pytest.raises(CommandError) as refused:
        space.apply({"apiVersion": "v1", "kind": "List", "items": pods}, "--dry-run=server", "--validate=false")
    theirs = {
        line.split('pods "')[1].split('"')[0]
        for line in str(refused.value).splitlines()
        if "violates PodSecurity" in line
    }
    assert theirs == {name for name, made in templates.items() if broken_rules(made)}
    assert len(theirs) == len(VALID), str(refused.value)


@pytest.mark.controlplane
def test_a_template_is_applied_rejected_and_removed_in_the_cluster(space: Space, operator: OperatorProcess) -> None:
    space.apply(resource())
    plain = eventually(lambda: _template(space), within=20, what="the Deployment")
    sidecar = {"spec": {"containers": [SIDECAR], "hostNetwork": False, "nodeSelector": {}, "tolerations": []}}
    space.apply(resource(podTemplate=sidecar))
    space.wait_condition("PodsRestricted", "True", "Restricted")
    eventually(lambda: len(_template(space)["spec"]["containers"]) == 2, within=20, what="the sidecar")
    space.apply(resource(podTemplate={"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}))
    condition = space.wait_condition("Progressing", "False", "PodTemplateRefused")
    assert "the container engine must not be removed" in condition["message"]
    assert len(_template(space)["spec"]["containers"]) == 2, "the pods must stay unchanged"
    space.apply(resource(podTemplate=UNSAFE))
    condition = space.wait_condition("Progressing", "False", "PodTemplateRefused")
    assert "container proxy: securityContext.allowPrivilegeEscalation must be false" in condition["message"]
    assert len(_template(space)["spec"]["containers"]) == 2, "the pods must stay unchanged"
    space.wait_condition("PodsRestricted", "True", "Restricted")
    space.apply(resource())
    eventually(lambda: _template(space) == plain, within=20, what="the original template")
    eventually(
        lambda: "PodsRestricted" not in json.dumps(space.get("fgd", "chat")["status"]),
        within=20,
        what="the end of the condition",
    )
    operator.let_resyncs_pass(1)


def _template(space: Space) -> Object:
    try:
        found: Object = space.get("deployment", "chat")["spec"]["template"]
    except KubeError:
        return {}
    return found
