"""The chart renders its values, rejects invalid ones, and grants the operator only the rights that it uses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.commands import CommandError
from fastgen_operator.api.crd import custom_resource_definition
from fastgen_operator.children.model_volume import SAFE_TO_EVICT
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import EVENT, FASTGEN, LEASE, NODE, OPTIONAL_KINDS, POD
from fastgen_operator.runtime.informers import kinds_read
from fastgen_operator.runtime.settings import Settings, parse_settings
from harness.chart import CHART, SYSTEM, Helm
from support.manifests import load_all
from support.namespace import Object

Right = tuple[str, str, str]
NO_USER_ROLES = ("--set", "rbac.aggregateToDefaultRoles=false")
DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def rights(role: Object) -> set[Right]:
    """Return (group, resource, verb) of the rules of a Role or ClusterRole."""
    return {
        (group, name, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
        for verb in rule["verbs"]
    }


def used_rights() -> set[Right]:
    """Return the (group, resource, verb) that the operator's code uses."""
    platform = Platform("engine:test", optional_kinds=frozenset(OPTIONAL_KINDS))
    # kopf's watches and kube/relist.py
    watched = (FASTGEN, *kinds_read(platform))
    used = {(kind.group, kind.plural, verb) for kind in watched for verb in ("list", "watch")}
    # Optional kinds are only listed.
    used -= {(kind.group, kind.plural, "watch") for kind in OPTIONAL_KINDS}
    # get: to check whether a child's name is taken. Server-side apply needs patch and create.
    for kind in platform.kinds:
        used |= {(kind.group, kind.plural, verb) for verb in ("get", "create", "patch", "delete")}
    # To check that the resource still exists before creating children.
    used.add((FASTGEN.group, FASTGEN.plural, "get"))
    used.add((FASTGEN.group, f"{FASTGEN.plural}/status", "patch"))
    used |= {(POD.group, POD.plural, verb) for verb in ("patch", "delete")}
    # list: those of pods without containers
    used |= {(EVENT.group, EVENT.plural, verb) for verb in ("list", "create", "patch")}
    # children/download_placement.py
    used.add((NODE.group, NODE.plural, "list"))
    # For blockOwnerDeletion, set in children/metadata.py.
    used.add((FASTGEN.group, f"{FASTGEN.plural}/finalizers", "update"))
    return used


def test_helm_lint_is_clean(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm.run("lint", "--strict", str(CHART))


def of_kind(kind: str, objects: list[Object]) -> list[Object]:
    found = [obj for obj in objects if obj["kind"] == kind]
    assert found
    return found


def test_the_default_is_one_operator_for_all_namespaces(helm: Helm) -> None:
    kinds = sorted(obj["kind"] for obj in helm.render())
    assert kinds == [
        *("ClusterRole", "ClusterRole", "ClusterRole"),
        "ClusterRoleBinding",
        "ConfigMap",
        "CustomResourceDefinition",
        "Deployment",
        "NetworkPolicy",
        "PriorityClass",
        "Role",
        "RoleBinding",
        "ServiceAccount",
        *("ValidatingAdmissionPolicy",) * 4,
        *("ValidatingAdmissionPolicyBinding",) * 4,
    ]
    deployment = helm.one("Deployment")["spec"]
    assert deployment["replicas"] == 1
    # A new standby starts before the leader is stopped.
    assert deployment["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def settings_of(deployment: Object) -> Settings:
    """Return the settings that the operator parses from its rendered command line."""
    return parse_settings(deployment["spec"]["template"]["spec"]["containers"][0]["args"])


@pytest.mark.parametrize("release", ["fastgen", "prod"])
def test_leader_election_has_rights_on_one_lease_in_the_releases_namespace_only(helm: Helm, release: str) -> None:
    text = helm.run("template", release, str(CHART), "--namespace", SYSTEM, "--set", "watchNamespaces={one}")
    objects = load_all(text)
    (role,) = [obj for obj in objects if obj["kind"] == "Role" and obj["metadata"]["name"].endswith("-election")]
    (deployment,) = [obj for obj in objects if obj["kind"] == "Deployment"]
    settings = settings_of(deployment)
    assert settings.leader_elect
    assert role["metadata"]["namespace"] == settings.lease_namespace == SYSTEM
    # Reads and writes of the Lease in lease.py.
    events = {(EVENT.group, EVENT.plural, verb) for verb in ("create", "patch")}
    assert rights(role) == {(LEASE.group, LEASE.plural, verb) for verb in ("get", "create", "update")} | events
    rules = [rule for rule in role["rules"] if rule["resources"] == [LEASE.plural]]
    named = {verb: rule.get("resourceNames") for rule in rules for verb in rule["verbs"]}
    assert named == {"create": None, "get": [settings.lease], "update": [settings.lease]}
    others = [obj for obj in objects if obj["kind"] == "Role" and obj is not role]
    assert not [right for other in others for right in rights(other) if right[1] == LEASE.plural]


def test_a_release_with_a_class_handles_only_that_class_and_elects_separately(helm: Helm) -> None:
    plain, blue = (settings_of(helm.one("Deployment", *args)) for args in ((), ("--set", "operatorClass=blue")))
    assert (plain.operator_class, blue.operator_class) == (None, "blue")
    assert plain.lease != blue.lease
    (role,) = [obj for obj in helm.render("--set", "operatorClass=blue") if obj["kind"] == "Role"]
    assert {name for rule in role["rules"] for name in rule.get("resourceNames", ())} == {blue.lease}


def test_several_operators_spread_over_nodes_and_have_a_disruption_budget(helm: Helm) -> None:
    assert not [obj for obj in helm.render() if obj["kind"] == "PodDisruptionBudget"]
    budget = helm.one("PodDisruptionBudget", "--set", "operator.replicas=2")["spec"]
    deployment = helm.one("Deployment", "--set", "operator.replicas=2")["spec"]
    assert deployment["replicas"] == 2
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == deployment["selector"]
    affinity = deployment["template"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    expected = {"topologyKey": "kubernetes.io/hostname", "labelSelector": deployment["selector"]}
    assert term["podAffinityTerm"] == expected


def bindings(helm: Helm, *args: str) -> dict[str, Object]:
    """Return the bindings of the admission policies by the last part of their policy's name."""
    found = [obj["spec"] for obj in helm.render(*args) if obj["kind"] == "ValidatingAdmissionPolicyBinding"]
    return {spec["policyName"].rpartition("-")[2]: spec for spec in found}


def test_the_admission_policies_apply_everywhere_and_can_be_disabled(helm: Helm) -> None:
    for binding in bindings(helm).values():
        assert "matchResources" not in binding
        assert binding["validationActions"] == ["Deny"]
    for policy in of_kind("ValidatingAdmissionPolicy", helm.render()):
        name = policy["metadata"]["name"].rpartition("-")[2]
        # See docs/decisions/045: with Fail, that one would reject the Deployments of all users without the CRD.
        assert policy["spec"]["failurePolicy"] == ("Ignore" if name == "templates" else "Fail"), name
    objects = helm.render("--set", "admissionPolicy.enabled=false")
    assert not [obj for obj in objects if obj["kind"].startswith("ValidatingAdmissionPolicy")]


def test_the_operator_has_exactly_the_rights_that_it_uses(helm: Helm) -> None:
    assert rights(helm.one("ClusterRole", *NO_USER_ROLES)) == used_rights()


def test_roles_can_be_left_to_the_administrator(helm: Helm) -> None:
    off = ("--set", "rbac.create=false", "--set", "serviceAccount.create=false", *NO_USER_ROLES)
    for scope in ("[]", '["one"]'):
        kinds = {obj["kind"] for obj in helm.render("--set-json", f"watchNamespaces={scope}", *off)}
        assert not kinds & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount"}, scope


def test_watched_namespaces_get_a_role_each_and_no_cluster_role(helm: Helm) -> None:
    objects = helm.render("--set", "watchNamespaces={one,two}")
    # Also none for users: it would need rights on the cluster.
    assert not [obj for obj in objects if obj["kind"].startswith("ClusterRole")]
    everywhere = [obj for obj in objects if not obj["metadata"]["name"].endswith("-election")]
    policies = bindings(helm, "--set", "watchNamespaces={one,two}")
    for name in ("authors", "limits"):
        (places,) = policies.pop(name)["matchResources"]["namespaceSelector"]["matchExpressions"]
        assert places["values"] == ["one", "two"]
    assert policies.keys() == {"writes", "templates"}
    assert not [spec for spec in policies.values() if "matchResources" in spec], "the operator is restricted everywhere"
    roles = [obj for obj in everywhere if obj["kind"] == "Role"]
    bound = [obj for obj in everywhere if obj["kind"] == "RoleBinding"]
    assert [obj["metadata"]["namespace"] for obj in roles] == ["one", "two"]
    assert [obj["metadata"]["namespace"] for obj in bound] == ["one", "two"]
    assert all(rights(role) == used_rights() - {(NODE.group, NODE.plural, "list")} for role in roles)
    args = helm.one("Deployment", "--set", "watchNamespaces={one,two}")["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    assert [word for word in args if word.startswith("--namespace=")] == ["--namespace=one", "--namespace=two"]


@pytest.mark.parametrize("release", ["fastgen", "prod"])
def test_the_role_binding_refers_to_the_pods_service_account(helm: Helm, release: str) -> None:
    by_kind = {obj["kind"]: obj for obj in helm.render(*NO_USER_ROLES, release=release)}
    name = by_kind["ServiceAccount"]["metadata"]["name"]
    assert by_kind["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] == name
    subject = {"kind": "ServiceAccount", "name": name, "namespace": SYSTEM}
    assert by_kind["ClusterRoleBinding"]["subjects"] == [subject]
    assert by_kind["ClusterRoleBinding"]["roleRef"]["name"] == by_kind["ClusterRole"]["metadata"]["name"]


def test_the_service_account_has_the_chosen_name_and_annotations(helm: Helm) -> None:
    chosen = {"name": "mine", "annotations": {"eks.amazonaws.com/role-arn": "none"}}
    args = ("--set-json", f"serviceAccount={json.dumps(chosen)}")
    account = helm.one("ServiceAccount", *args)["metadata"]
    assert (account["name"], account["annotations"]) == ("mine", chosen["annotations"])
    others = helm.render(*args, "--set", "serviceAccount.create=false")
    assert "ServiceAccount" not in {obj["kind"] for obj in others}
    for objects in (helm.render(*args), others):
        (pod,) = [obj["spec"]["template"]["spec"] for obj in objects if obj["kind"] == "Deployment"]
        assert pod["serviceAccountName"] == "mine"
        named = {subject["name"] for obj in objects for subject in obj.get("subjects", ())}
        assert named == {"mine"}


def test_the_operator_accepts_its_rendered_command_line(helm: Helm) -> None:
    container = helm.one(
        *("Deployment", "--set", f"engine.image=registry.example/engine@{DIGEST}", "--set", "operator.verbose=true"),
        *("--set", "operator.resyncSeconds=7", "--set", "operator.relistSeconds=77", "--set", "watchNamespaces={a}"),
        *("--set", "operator.workers=9", "--set-json", "operator.scrapeSeconds=2.5"),
        *("--set", "operator.extraArgs={--request-seconds=60}", "--set", "engine.imagePullSecrets={one,two}"),
    )["spec"]["template"]["spec"]["containers"][0]
    settings = parse_settings(container["args"])
    assert settings.engine_image == f"registry.example/engine@{DIGEST}"
    assert (settings.resync_seconds, settings.relist_seconds) == (7, 77)
    assert (settings.namespaces, settings.verbose) == (("a",), True)
    assert (settings.scrape_seconds, settings.workers, settings.request_seconds) == (2.5, 9, 60)
    assert settings.pods.image_pull_secrets == ("one", "two")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"metrics": settings.metrics_port, "health": settings.health_port}


def test_the_operators_pod_is_restricted(helm: Helm) -> None:
    pod = helm.one("Deployment")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert {probe for probe in container if probe.endswith("Probe")} == {
        "startupProbe",
        "readinessProbe",
        "livenessProbe",
    }
    assert container["resources"]["requests"]


def test_a_probe_that_kills_the_operator_asks_for_progress_and_not_for_a_full_list(helm: Helm) -> None:
    container = helm.one("Deployment")["spec"]["template"]["spec"]["containers"][0]
    paths = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    # A process that is short of CPU answers late. The default of one second would count as a failure.
    assert all(container[name]["timeoutSeconds"] >= 5 for name in paths)
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 120


def test_the_crd_is_the_generated_one_kept_at_uninstall_and_optional(helm: Helm) -> None:
    crd = helm.one("CustomResourceDefinition")
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd == custom_resource_definition()
    kinds = [obj["kind"] for obj in helm.render("--set", "crd.install=false")]
    assert "CustomResourceDefinition" not in kinds


PLACEMENT: dict[str, Any] = {
    "replicas": 3,
    "imagePullPolicy": "Always",
    "logFormat": "text",
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    "imagePullSecrets": ["mine"],
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "high",
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {},
        }
    ],
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "more", "configMap": {"name": "more"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more", "readOnly": True}],
    "podSecurityContext": {"runAsUser": 1000, "fsGroupChangePolicy": "OnRootMismatch"},
    "securityContext": {"readOnlyRootFilesystem": False},
    "podLabels": {"team": "search"},
    "podAnnotations": {"note": "yes"},
}


def test_every_value_of_the_operators_pod_is_rendered(helm: Helm) -> None:
    deployment = helm.one("Deployment", "--set-json", f"operator={json.dumps(PLACEMENT)}")
    assert deployment["spec"]["replicas"] == 3
    assert settings_of(deployment).log_format == "text"
    template = deployment["spec"]["template"]
    pod = template["spec"]
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "disk": "fast"}
    for name in ("tolerations", "affinity", "priorityClassName", "topologySpreadConstraints"):
        assert pod[name] == PLACEMENT[name], name
    (container,) = pod["containers"]
    for name in ("imagePullPolicy", "resources"):
        assert container[name] == PLACEMENT[name], name
    assert container["env"][-1:] == PLACEMENT["extraEnv"]
    assert pod["volumes"][-1:] == PLACEMENT["extraVolumes"]
    assert container["volumeMounts"][-1:] == PLACEMENT["extraVolumeMounts"]
    assert {item["name"] for item in pod["volumes"]} == {item["name"] for item in container["volumeMounts"]}
    chosen = pod["securityContext"]
    assert (chosen["runAsUser"], chosen["runAsGroup"], chosen["runAsNonRoot"]) == (1000, 65532, True)
    assert chosen["fsGroupChangePolicy"] == "OnRootMismatch"
    assert container["securityContext"]["readOnlyRootFilesystem"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert template["metadata"]["labels"]["team"] == "search"
    assert template["metadata"]["annotations"] == {SAFE_TO_EVICT: "tmp", "note": "yes"}


def test_pods_of_the_chart_run_on_linux_with_bounded_scratch_space_that_does_not_hold_a_node(helm: Helm) -> None:
    operator = helm.one("Deployment")["spec"]["template"]
    (tested,) = [obj for obj in helm.tests() if obj["kind"] == "Pod"]
    for pod in (operator["spec"], tested["spec"]):
        assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert [volume["emptyDir"].keys() for volume in pod["volumes"]] == [{"sizeLimit"}]
    assert operator["metadata"]["annotations"] == {SAFE_TO_EVICT: "tmp"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("operater.image=x", "additional properties 'operater' not allowed"),
        ("operator.replica=2", "additional properties 'replica' not allowed"),
        ("operator.replicas=0", "/operator/replicas"),
        ("operator.image=", "/operator/image"),
        ("engine.image=two words", "/engine/image"),
        ("operator.logFormat=xml", "/operator/logFormat"),
        ("operator.resyncSeconds=0", "/operator/resyncSeconds"),
        ("watchNamespaces={Not_A_Name}", "/watchNamespaces/0"),
        ("operatorClass=Blue", "/operatorClass"),
        ("crd.install=maybe", "/crd/install"),
        ("engine.image=engine@sha256:1", "/engine/image"),
        ("imageRegistry=https://registry", "/imageRegistry"),
        ("operator.extraArgs={verbose}", "/operator/extraArgs/0"),
        ("operator.tolerations[0].efect=NoSchedule", "additional properties 'efect' not allowed"),
        ("operator.securityContext.runAsRoot=true", "additional properties 'runAsRoot' not allowed"),
        ("operator.networkPolicy.apiServer=null", "/operator/networkPolicy"),
    ],
)
def test_invalid_values_are_rejected_by_name(helm: Helm, value: str, words: str) -> None:
    with pytest.raises(CommandError) as refused:
        helm.render("--set", value)
    assert words in str(refused.value)


def test_the_registry_is_put_in_front_of_both_images(helm: Helm) -> None:
    container = helm.one(
        *("Deployment", "--set", "imageRegistry=registry.example:5000/mirror", "--set", "engine.image=engine:1"),
        *("--set", f"operator.image=operator:1@{DIGEST}"),
    )["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"registry.example:5000/mirror/operator:1@{DIGEST}"
    assert parse_settings(container["args"]).engine_image == "registry.example:5000/mirror/engine:1"


def test_a_spread_constraint_counts_the_operators_pods_by_default(helm: Helm) -> None:
    spread = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    spec = helm.one("Deployment", "--set-json", f"operator.topologySpreadConstraints={json.dumps(spread)}")["spec"]
    assert spec["template"]["spec"]["topologySpreadConstraints"] == [{**spread[0], "labelSelector": spec["selector"]}]


def test_users_get_rights_by_the_clusters_own_roles(helm: Helm) -> None:
    roles = [obj for obj in helm.render() if "rules" in obj and obj["metadata"]["name"].endswith(("-view", "-edit"))]
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    granted: dict[str, set[Right]] = {}
    for role in roles:
        for label in role["metadata"]["labels"]:
            if label.startswith(prefix):
                granted.setdefault(label.removeprefix(prefix), set()).update(rights(role))
    read = {(FASTGEN.group, FASTGEN.plural, verb) for verb in ("get", "list", "watch")}
    write = {
        (FASTGEN.group, FASTGEN.plural, verb) for verb in ("create", "delete", "deletecollection", "patch", "update")
    }
    scale = {(FASTGEN.group, f"{FASTGEN.plural}/scale", verb) for verb in ("patch", "update")}
    parts = {(FASTGEN.group, f"{FASTGEN.plural}/{part}", "get") for part in ("status", "scale")}
    everything = read | write | scale | parts
    assert granted == {"view": read | parts, "edit": everything, "admin": everything}


def test_the_notes_show_the_next_commands(helm: Helm) -> None:
    notes = helm.run("install", "fastgen", str(CHART), "--dry-run=client", "--namespace", SYSTEM).partition("NOTES:")[2]
    for words in (
        "kubectl apply -f -",
        "kubectl wait fgd/smollm2",
        "watches all namespaces",
        "deployment/fastgen-operator",
        "fastgen-operator-dashboards",
        "spec.network.allowFrom",
    ):
        assert words in notes
