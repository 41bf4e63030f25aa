"""spec.podTemplate: merged strategically, rejected if it breaks the engine, and checked for Pod Security."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.commands import CommandError
from fastgen_operator.children.pod_security import broken_rules
from fastgen_operator.children.template import TemplateRefused, build_template
from fastgen_operator.kinds import Object
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.status.conditions.pods_restricted import PODS_RESTRICTED
from fastgen_operator.status.conditions.table import all_conditions
from harness.objects import observed, pod, situation, spec_of, stored
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.waiting import eventually

SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SIDECAR = {"name": "proxy", "image": "proxy:1", "securityContext": SAFE}


def template(**pod_template: Any) -> Object:
    return build_template("chat", spec_of(stored(podTemplate=pod_template)), "engine:test")


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
    "a replaced item": ({"containers": [{"name": "engine", "$patch": "replace"}]}, "must be a separate item"),
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


def test_an_empty_template_is_none() -> None:
    assert template() == template(spec={}) == build_template("chat", spec_of(stored()), "engine:test")


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


def of_engine(**fields: Any) -> Object:
    return {"containers": [{"name": "engine", **fields}]}


def context(**fields: Any) -> Object:
    return of_engine(securityContext=fields)


# Patches that violate the restricted standard, and part of the expected message.
INSECURE: dict[str, tuple[Object, str]] = {
    "host network": ({"hostNetwork": True}, "hostNetwork must be false"),
    "host processes": ({"hostPID": True}, "hostPID must be false"),
    "a host path volume": ({"volumes": [{"name": "n", "hostPath": {"path": "/"}}]}, "volume n: hostPath"),
    "a pod that runs as root": ({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser must not be 0"),
    "a pod that can run as root": ({"securityContext": {"runAsNonRoot": None}}, "runAsNonRoot must be true"),
    "an unconfined seccomp profile": (
        {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
        "seccompProfile.type must be",
    ),
    "no seccomp profile": ({"securityContext": {"seccompProfile": None}}, "container engine: securityContext.seccomp"),
    "a sysctl": (
        {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
        "kernel.msgmax is not allowed",
    ),
    "a privileged engine": (
        context(privileged=True, allowPrivilegeEscalation=True),
        "container engine: securityContext.privileged",
    ),
    "privilege escalation": (context(allowPrivilegeEscalation=True), "allowPrivilegeEscalation must be false"),
    "a capability": (context(capabilities={"add": ["IPC_LOCK"]}), "capabilities.add must not contain IPC_LOCK"),
    "all capabilities": (context(capabilities={"drop": []}), "capabilities.drop must contain ALL"),
    "a container that runs as root": (context(runAsUser=0), "container engine: securityContext.runAsUser"),
    "an unconfined seccomp profile of the engine": (
        context(seccompProfile={"type": "Unconfined"}),
        "container engine: securityContext.seccomp",
    ),
    "an SELinux role": (context(seLinuxOptions={"role": "x"}), "seLinuxOptions must only set"),
    "an unconfined AppArmor profile": (context(appArmorProfile={"type": "Unconfined"}), "appArmorProfile.type must be"),
    "a host port": (of_engine(ports=[{"containerPort": 9, "hostPort": 9}]), "hostPort 9 is not allowed"),
    "a probe of another host": (
        of_engine(livenessProbe={"httpGet": {"host": "a", "path": "/", "port": 1}}),
        "must not set host",
    ),
    "a plain sidecar": ({"containers": [{"name": "proxy", "image": "p"}]}, "container proxy: securityContext.allow"),
    "a plain init container": ({"initContainers": [{"name": "i", "image": "p"}]}, "container i: securityContext.allow"),
}


# This API server does not allow privileged containers, so it rejects them before admission runs.
VALID = {case: patch for case, (patch, _) in INSECURE.items() if case != "a privileged engine"}


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
    space.apply(resource(podTemplate={"spec": {"containers": [{"name": "proxy", "image": "proxy:1"}]}}))
    condition = space.wait_condition("PodsRestricted", "False", "PodTemplateNotRestricted")
    assert "container proxy: securityContext.allowPrivilegeEscalation must be false" in condition["message"]
    condition = space.wait_condition("Progressing", "False", "ReplicaFailure")
    assert "violates PodSecurity" in condition["message"]
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
