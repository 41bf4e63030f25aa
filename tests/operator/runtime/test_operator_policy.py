"""The chart's admission policies on the operator: what somebody with its credentials can write."""

from __future__ import annotations

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import (
    CLAIM,
    DEPLOYMENT,
    EVENT,
    FASTGEN,
    JOB,
    LEASE,
    NETWORK_POLICY,
    POD,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from fastgen_operator.kube.transport import ApiServer, KubeError
from harness.chart import SYSTEM, operator_kubeconfig
from harness.insecure import INSECURE
from harness.objects import ANY_TEMPLATE, manifests
from harness.process import OperatorProcess
from harness.space import Space, resource
from harness.thief import APPLY, END, ENGINE, POD_SPEC, changed, children, deployment, dry, thief_of
from harness.user import create_refusal, refusal
from support.namespace import MERGE, Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

RESTRICTED = "must be restricted"
# Two policies reject a volume of another kind, and the API server names either.
VOLUME_REFUSED = "only have volumes|does not name a volume"


@pytest.fixture
def thief(plane: ControlPlane) -> ApiServer:
    return thief_of(plane)


@pytest.fixture
def owner(space: Space, thief: ApiServer) -> Object:
    """A FastGenDeployment that names the Secrets token and keys, once the policies have seen it."""
    space.apply(resource(**NAMED))
    found = space.get("fgd", "chat")
    wrong = changed(deployment(found), ("metadata", "ownerReferences", 0, "uid"), "made-up")
    eventually(lambda: "another FastGenDeployment" in dry(thief, DEPLOYMENT, wrong), within=20, what="the policies")
    return found


TOKEN: Object = {"serviceAccountToken": {"path": "p", "audience": "mine"}}
CSI: Object = {"driver": "secrets-store.csi.k8s.io", "volumeAttributes": {"secretProviderClass": "mine"}}
NAMED: Object = {
    "model": {"source": "hf://owner/tiny", "secretName": "token"},
    "cache": {"size": "1Gi", "preload": False},
    "apiKeySecretName": "keys",
    "podTemplate": {
        "spec": {
            "volumes": [
                {"name": "extra", "secret": {"secretName": "extra"}},
                {"name": "mixed", "projected": {"sources": [{"secret": {"name": "extra"}}, TOKEN]}},
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
                {"name": "store", "csi": CSI},
            ],
            "containers": [
                {
                    "name": "engine",
                    "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "extra", "key": "a"}}}],
                }
            ],
            "imagePullSecrets": [{"name": "registry"}],
        }
    },
}


SECRET_VOLUME = {"name": "v", "secret": {"secretName": "admin"}}
# The first of the volumes of spec.podTemplate, after tmp, cache, shm, models and api-keys.
EXTRA = 5
CLONE = {
    **{"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    "dataSource": {"kind": "PersistentVolumeClaim", "name": "other"},
}
SECRET_VARIABLE = {"name": "B", "valueFrom": {"secretKeyRef": {"name": "admin", "key": "a"}}}
# Changes of the Deployment that its FastGenDeployment asks for, and a pattern of the rejection's words.
HOSTILE_DEPLOYMENTS: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "without an owner": (("metadata", "ownerReferences"), [], "whose controller"),
    "with an owner that does not control it": (
        ("metadata", "ownerReferences", 0, "controller"),
        False,
        "whose controller",
    ),
    "with an owner of another kind": (("metadata", "ownerReferences", 0, "kind"), "Deployment", "whose controller"),
    "with an owner of another group": (("metadata", "ownerReferences", 0, "apiVersion"), "apps/v1", "whose controller"),
    "with an owner of a version that does not exist": (
        ("metadata", "ownerReferences", 0, "apiVersion"),
        "fastgen.dev/v9",
        "whose controller",
    ),
    "with a second owner": (
        ("metadata", "ownerReferences", END),
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "kube-root-ca.crt", "uid": "made-up"},
        "other owners",
    ),
    "with a finalizer": (("metadata", "finalizers"), ["example.com/stay"], "add finalizers"),
    "with another uid of its owner": (
        ("metadata", "ownerReferences", 0, "uid"),
        "made-up",
        "another FastGenDeployment",
    ),
    "of another name": (("metadata", "name"), "other", "with the name of their FastGenDeployment"),
    "labelled with another name": (("metadata", "labels", "fastgen.dev/deployment"), "other", "whose controller"),
    "with a volume of another Secret": ((*POD_SPEC, "volumes", END), SECRET_VOLUME, "does not name a volume"),
    "with the name of a volume that the spec names, of another Secret": (
        (*POD_SPEC, "volumes", EXTRA),
        {"name": "extra", "secret": {"secretName": "admin"}},
        "does not name a volume",
    ),
    "with another Secret in a projected volume that the spec names": (
        (*POD_SPEC, "volumes", EXTRA + 1, "projected", "sources", 0, "secret", "name"),
        "admin",
        "does not name a volume",
    ),
    "with another audience in a projected volume that the spec names": (
        (*POD_SPEC, "volumes", EXTRA + 1, "projected", "sources", 1, "serviceAccountToken", "audience"),
        "vault",
        "does not name a volume",
    ),
    "with another claim in a volume that the spec names": (
        (*POD_SPEC, "volumes", EXTRA + 2, "persistentVolumeClaim", "claimName"),
        "other",
        "does not name a volume",
    ),
    "with other attributes of a CSI volume that the spec names": (
        (*POD_SPEC, "volumes", EXTRA + 3, "csi", "volumeAttributes", "secretProviderClass"),
        "admin",
        "does not name a volume",
    ),
    "with a clone of another claim": (
        (*POD_SPEC, "volumes", END),
        {"name": "v", "ephemeral": {"volumeClaimTemplate": {"spec": CLONE}}},
        "does not name a volume",
    ),
    "with a projected Secret": (
        (*POD_SPEC, "volumes", END),
        {"name": "v", "projected": {"sources": [{"secret": {"name": "admin"}}]}},
        "does not name a volume",
    ),
    "with a token of another audience": (
        (*POD_SPEC, "volumes", END),
        {"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "p", "audience": "vault"}}]}},
        "does not name a volume",
    ),
    "with another claim": (
        (*POD_SPEC, "volumes", END),
        {"name": "v", "persistentVolumeClaim": {"claimName": "other"}},
        "does not name a volume",
    ),
    "with a variable of another Secret": ((*ENGINE, "env", END), SECRET_VARIABLE, "does not name a Secret"),
    "with all variables of another Secret": (
        (*ENGINE, "envFrom"),
        [{"secretRef": {"name": "admin"}}],
        "does not name a Secret",
    ),
    "with another pull Secret": ((*POD_SPEC, "imagePullSecrets", END), {"name": "admin"}, "image pull Secret"),
    "with another ServiceAccount": ((*POD_SPEC, "serviceAccountName"), "admin", "does not name the ServiceAccount"),
    "with the namespace's default ServiceAccount": (
        (*POD_SPEC, "serviceAccountName"),
        None,
        "does not name the ServiceAccount",
    ),
    "with a priority class": (
        (*POD_SPEC, "priorityClassName"),
        "system-node-critical",
        "does not name the priorityClassName",
    ),
    "with a runtime class": ((*POD_SPEC, "runtimeClassName"), "runc", "does not name the runtimeClassName"),
    "with a device claim": (
        (*POD_SPEC, "resourceClaims"),
        [{"name": "gpu", "resourceClaimName": "theirs"}],
        "does not name a resource claim",
    ),
    "on the host's network": ((*POD_SPEC, "hostNetwork"), True, "namespaces of the host"),
    "with the host's processes": ((*POD_SPEC, "hostPID"), True, "namespaces of the host"),
    "with the host's files": (
        (*POD_SPEC, "volumes", END),
        {"name": "v", "hostPath": {"path": "/"}},
        VOLUME_REFUSED,
    ),
    "with capabilities": ((*ENGINE, "securityContext", "capabilities", "add"), ["SYS_ADMIN"], RESTRICTED),
    "as root": ((*ENGINE, "securityContext", "runAsUser"), 0, RESTRICTED),
    "with another container as root": ((*POD_SPEC, "containers", END), {"name": "x", "image": "x"}, RESTRICTED),
    "outside AppArmor": (
        ("spec", "template", "metadata", "annotations"),
        {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"},
        "may not leave AppArmor",
    ),
    "with pods of another FastGenDeployment": (
        ("spec", "template", "metadata", "labels", "fastgen.dev/deployment"),
        "other",
        "select and create pods",
    ),
}


def test_the_operators_children_are_accepted(thief: ApiServer, owner: Object) -> None:
    for kind, manifest in children(owner).items():
        assert dry(thief, kind, manifest) == "", kind.name


@pytest.mark.parametrize("case", HOSTILE_DEPLOYMENTS)
def test_a_hostile_deployment_is_refused(case: str, thief: ApiServer, owner: Object) -> None:
    path, value, pattern = HOSTILE_DEPLOYMENTS[case]
    if case == "with pods of another FastGenDeployment":  # the API server requires that the selector matches
        base = changed(deployment(owner), ("spec", "selector", "matchLabels"), {"fastgen.dev/deployment": "other"})
    else:
        base = deployment(owner)
    hostile = changed(base, path, value)
    try:
        found = dry(thief, DEPLOYMENT, hostile)
    except KubeError as error:  # privileged containers are forbidden on this API server
        found = str(error)
    assert re.search(pattern, found), found


def test_children_cannot_reach_pods_traffic_or_data_of_others(thief: ApiServer, owner: Object) -> None:
    made = children(owner)
    other = {"app": "payments"}
    cases: list[tuple[Kind, tuple[Any, ...], Any, str]] = [
        (SERVICE, ("spec", "selector"), other, "select and create pods"),
        (SERVICE, ("spec", "externalIPs"), ["10.0.0.1"], "without external addresses"),
        (SERVICE, ("spec", "type"), "NodePort", "of type ClusterIP"),
        (SERVICE, ("metadata", "name"), "payments", "with the name of"),
        (NETWORK_POLICY, ("spec", "podSelector"), {"matchLabels": other}, "select and create pods"),
        (POD_DISRUPTION_BUDGET, ("spec", "selector"), {"matchLabels": other}, "select and create pods"),
        (CLAIM, ("spec", "volumeName"), "theirs", "may not choose their volume"),
        (CLAIM, ("spec", "selector"), {"matchLabels": other}, "may not choose their volume"),
        (CLAIM, ("spec", "dataSource"), {"kind": "PersistentVolumeClaim", "name": "theirs"}, "without a data source"),
        (SERVICE_ACCOUNT, ("metadata", "annotations"), {"eks.amazonaws.com/role-arn": "admin"}, "may not annotate"),
        (SERVICE_ACCOUNT, ("imagePullSecrets",), [{"name": "admin"}], "may not give ServiceAccounts Secrets"),
        (SERVICE_ACCOUNT, ("secrets",), [{"name": "admin"}], "may not give ServiceAccounts Secrets"),
    ]
    for kind, path, value, words in cases:
        assert words in dry(thief, kind, changed(made[kind], path, value)), (kind.name, path)


def test_nothing_is_written_in_reserved_namespaces(thief: ApiServer, owner: Object) -> None:
    for kind, manifest in children(owner).items():
        moved = changed(manifest, ("metadata", "namespace"), "kube-system")
        assert "reservedNamespaces" in dry(thief, kind, moved), kind.name


def test_a_job_runs_only_pods_of_its_resource(thief: ApiServer, owner: Object) -> None:
    metadata = {**deployment(owner)["metadata"], "name": "chat-fetch-1"}
    template = copy.deepcopy(deployment(owner)["spec"]["template"])
    template["metadata"]["labels"]["fastgen.dev/deployment"] = "chat_fetch"
    template["spec"]["restartPolicy"] = "OnFailure"
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": template}}
    assert dry(thief, JOB, job) == ""
    assert "with the name of" in dry(thief, JOB, changed(job, ("metadata", "name"), "mine"))
    assert "whose controller" in dry(thief, JOB, changed(job, ("metadata", "ownerReferences"), []))
    assert "does not name a volume" in dry(thief, JOB, changed(job, (*POD_SPEC, "volumes", END), SECRET_VOLUME))
    # The Job controller would take over, and delete, pods of others that have no owner.
    taking = changed(job, ("spec", "manualSelector"), True)
    taking = changed(taking, ("spec", "selector"), {"matchLabels": {"app": "payments"}})
    taking = changed(taking, ("spec", "template", "metadata", "labels", "app"), "payments")
    assert "may not choose the selector" in dry(thief, JOB, taking)


def test_a_canary_has_only_pods_of_its_resource(thief: ApiServer, owner: Object) -> None:
    made, own = children(owner), {"fastgen.dev/deployment": "chat_canary"}
    canary = changed(made[DEPLOYMENT], ("metadata", "name"), "chat-canary")
    canary = changed(canary, ("spec", "selector"), {"matchLabels": own})
    canary = changed(canary, ("spec", "template", "metadata", "labels", "fastgen.dev/deployment"), "chat_canary")
    service = changed(made[SERVICE], ("metadata", "name"), "chat-canary")
    service = changed(service, ("spec", "selector"), own)
    policy = changed(made[NETWORK_POLICY], ("metadata", "name"), "chat.canary")
    policy = changed(policy, ("spec", "podSelector"), {"matchLabels": own})
    for kind, manifest in ((DEPLOYMENT, canary), (SERVICE, service), (NETWORK_POLICY, policy)):
        assert dry(thief, kind, manifest) == "", kind.name
        assert "with the name of" in dry(thief, kind, changed(manifest, ("metadata", "name"), "mine-canary")), kind.name
    budget = changed(made[POD_DISRUPTION_BUDGET], ("metadata", "name"), "chat-canary")
    assert "with the name of" in dry(thief, POD_DISRUPTION_BUDGET, budget)
    other = {"fastgen.dev/deployment": "payments_canary"}
    assert "select and create pods" in dry(thief, SERVICE, changed(service, ("spec", "selector"), other))
    secret = changed(canary, (*POD_SPEC, "volumes", END), SECRET_VOLUME)
    assert "does not name a volume" in dry(thief, DEPLOYMENT, secret)


def test_objects_of_others_are_neither_changed_adopted_nor_deleted(
    thief: ApiServer, owner: Object, space: Space
) -> None:
    """Also if they have the child's name; but children that lost their controller are adopted."""
    made = children(owner)
    for kind, manifest in made.items():
        foreign = copy.deepcopy(manifest)
        del foreign["metadata"]["ownerReferences"], foreign["metadata"]["labels"]["app.kubernetes.io/managed-by"]
        space.server.request("POST", kind.path(space.name), None, foreign, "application/json")
        assert "only change objects that it has created" in dry(thief, kind, manifest), kind.name
        path = kind.path(space.name, "chat")
        assert "only delete objects" in refusal(thief, "DELETE", path, {}), kind.name
        label: Object = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "fastgen-operator"}}}
        space.patch(f"{kind.plural}/chat", label)
        assert dry(thief, kind, manifest) == "", kind.name
        # The garbage collector cannot look up an owner of a version that is not served, and leaves the object alone.
        former = {**_owner_of(owner), "apiVersion": "fastgen.dev/v0", "uid": "former", "controller": True}
        other = {**former, "name": "other"}
        space.patch(f"{kind.plural}/chat", {"metadata": {"ownerReferences": [other]}})
        with pytest.raises(KubeError, match="Only one reference can have Controller set to true"):
            dry(thief, kind, manifest)
        # Its own references instead of the others: nothing of a resource of another name is taken over.
        taken: Object = {"metadata": {"ownerReferences": manifest["metadata"]["ownerReferences"]}}
        words = refusal(thief, "PATCH", path, taken, content_type=MERGE, query=[("dryRun", "All")])
        assert "only change objects that it has created" in words, kind.name
        # But of an earlier resource of this name.
        space.patch(f"{kind.plural}/chat", {"metadata": {"ownerReferences": [former]}})
        assert refusal(thief, "PATCH", path, taken, content_type=MERGE, query=[("dryRun", "All")]) == "", kind.name


def _owner_of(obj: Object) -> Object:
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": obj["metadata"]["name"]}


def test_children_are_deleted_with_their_dependents(thief: ApiServer, owner: Object, space: Space) -> None:
    """A ReplicaSet without its Deployment would keep pods that no owner has."""
    path = DEPLOYMENT.path(space.name, "chat")
    thief.request("PATCH", path, [("fieldManager", "fastgen-operator")], deployment(owner), APPLY)
    for query, body in (
        ((), {"propagationPolicy": "Orphan"}),
        ((), {"orphanDependents": True}),
        ((("propagationPolicy", "Orphan"),), None),
    ):
        words = refusal(thief, "DELETE", path, body, query=query)
        assert "without their dependents" in words, (query, body)
    assert refusal(thief, "DELETE", path, {"propagationPolicy": "Background"}) == ""


def test_pods_are_only_annotated_and_deleted_and_only_those_of_resources(
    space: Space, thief: ApiServer, plane: ControlPlane, tmp_path: Path
) -> None:
    process = OperatorProcess(operator_kubeconfig(plane), tmp_path / "log")
    process.start()
    try:
        space.apply(resource())
        (pod,) = space.wait_pods(1)
    finally:
        assert process.stop() == 0
    name = pod["metadata"]["name"]
    path = POD.path(space.name, name)
    cost: Object = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "1"}}}
    assert refusal(thief, "PATCH", path, cost, content_type=MERGE) == ""
    containers = [{**pod["spec"]["containers"][0], "image": "mine:1"}]
    hostile: list[Object] = [
        {"spec": {"containers": containers}},
        {"metadata": {"labels": {"app": "payments"}}},
        {"metadata": {"ownerReferences": None}},
    ]
    for patch in hostile:
        assert "only delete and annotate pods" in refusal(thief, "PATCH", path, patch, content_type=MERGE), patch
    stay: Object = {"metadata": {"finalizers": ["example.com/stay"]}}
    assert "add finalizers" in refusal(thief, "PATCH", path, stay, content_type=MERGE)
    safe = {
        "name": "engine",
        "image": "engine:test",
        "securityContext": pod["spec"]["containers"][0]["securityContext"],
    }
    spec = {"securityContext": pod["spec"]["securityContext"], "containers": [safe], "serviceAccountName": "chat"}
    metadata = {"name": "theirs", "labels": {"fastgen.dev/deployment": "chat"}}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    space.server.request("POST", POD.path(space.name), None, body, "application/json")
    theirs = POD.path(space.name, "theirs")
    assert "only delete and annotate pods" in refusal(thief, "PATCH", theirs, cost, content_type=MERGE)
    assert "only delete and annotate pods" in refusal(thief, "DELETE", theirs, {})
    assert refusal(thief, "DELETE", path, {}) == ""


def test_only_the_operators_own_events_and_lease_are_written(space: Space, thief: ApiServer, owner: Object) -> None:
    about = {**_owner_of(owner), "namespace": space.name, "uid": owner["metadata"]["uid"]}
    event = {
        "metadata": {"name": "e", "namespace": space.name},
        **{"involvedObject": about, "reason": "R", "message": "m", "type": "Normal"},
        **{"source": {"component": "fastgen-operator"}, "reportingComponent": "fastgen-operator", "count": 1},
    }
    assert create_refusal(thief, EVENT, event) == ""
    path = EVENT.path(space.name, "e")
    assert refusal(thief, "PATCH", path, {"count": 2}, content_type=MERGE) == ""
    forged = changed(changed(event, ("metadata", "name"), "f"), ("involvedObject",), {**about, "kind": "Secret"})
    assert "only write its own Events" in create_refusal(thief, EVENT, forged)
    space.server.request("POST", EVENT.path(space.name), None, forged, "application/json")
    words = refusal(thief, "PATCH", EVENT.path(space.name, "f"), {"message": "n"}, content_type=MERGE)
    assert "only write its own Events" in words
    lease = {"metadata": {"name": "cloud-controller", "namespace": SYSTEM}, "spec": {"holderIdentity": "me"}}
    assert "only write its own Lease" in create_refusal(thief, LEASE, lease)
    for namespace, name, words in (
        (SYSTEM, "fastgen-operator", ""),
        (SYSTEM, "cloud-controller", "only write its own Events"),
        (space.name, "fastgen-operator", "only write its own Events"),
    ):
        of_lease = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "namespace": namespace, "name": name}
        about_lease = {
            **event,
            "metadata": {"name": f"{space.name}-{name}", "namespace": namespace},
            "involvedObject": of_lease,
        }
        assert words in (found := create_refusal(thief, EVENT, about_lease)), found
        assert bool(found) == bool(words)
    status: Object = {"status": {"replicas": 1}}
    chat = FASTGEN.path(space.name, "chat", "status")
    assert refusal(thief, "PATCH", chat, status, content_type=MERGE) == ""


def test_what_another_writer_added_to_a_deployment_does_not_stop_the_operator(
    space: Space, thief: ApiServer, owner: Object
) -> None:
    """Such as an injector's sidecar with a Secret: the operator keeps it, and may write the rest."""
    added = {"spec": {"template": {"spec": {"volumes": [SECRET_VOLUME], "containers": [{"name": "x", "image": "x"}]}}}}
    query = [("fieldManager", "fastgen-operator"), ("force", "true")]
    path = DEPLOYMENT.path(space.name, "chat")
    thief.request("PATCH", path, query, deployment(owner), APPLY)
    space.server.request("PATCH", path, None, added, "application/strategic-merge-patch+json")
    edited = changed(deployment(owner), (*ENGINE, "env", 0, "value"), "/elsewhere")
    assert dry(thief, DEPLOYMENT, edited) == ""
    assert "does not name a volume" in dry(
        thief, DEPLOYMENT, changed(edited, (*POD_SPEC, "volumes", END), {**SECRET_VOLUME, "name": "w"})
    )


def test_what_the_operators_role_reads_has_no_secret(thief: ApiServer, owner: Object, space: Space) -> None:
    del owner
    for path in (POD.path(space.name), EVENT.path(space.name), FASTGEN.path(space.name), "/api/v1/nodes"):
        assert refusal(thief, "GET", path) == "", path
    for place in (f"/api/v1/namespaces/{space.name}", f"/api/v1/namespaces/{SYSTEM}", "/api/v1"):
        for plural in ("secrets", "configmaps"):
            assert "cannot list resource" in refusal(thief, "GET", f"{place}/{plural}"), place


def test_the_operators_credentials_choose_what_runs_beside_the_secrets_of_a_spec(
    thief: ApiServer, owner: Object
) -> None:
    made = deployment(owner)
    for path, value in (
        ((*ENGINE, "image"), "mine:1"),
        ((*ENGINE, "env", END), {"name": "X", "value": "x"}),
        ((*ENGINE, "resources"), {"limits": {"example.com/device": "8"}}),
        ((*POD_SPEC, "nodeName"), "n1"),
        ((*POD_SPEC, "tolerations"), [{"operator": "Exists"}]),
        ((*POD_SPEC, "volumes", END), {"name": "v", "configMap": {"name": "kube-root-ca.crt"}}),
        (("spec", "template", "metadata", "labels", "app"), "payments"),
        (("spec", "template", "metadata", "annotations", "sidecar.istio.io/inject"), "false"),
    ):
        assert dry(thief, DEPLOYMENT, changed(made, path, value)) == "", path


def test_an_owner_that_does_not_exist_lasts_until_the_garbage_collector_removes_the_deployment(
    space: Space, thief: ApiServer, owner: Object
) -> None:
    """What remains to somebody with the operator's credentials: pods by the restricted standard, for a moment."""
    metadata = {**owner["metadata"], "name": "nobody", "uid": "7f5c1f3e-0000-4000-8000-000000000000"}
    made_up = {**resource("nobody"), "metadata": metadata}
    stolen = changed(deployment(made_up), (*POD_SPEC, "volumes", END), SECRET_VOLUME)
    stolen = changed(stolen, (*POD_SPEC, "serviceAccountName"), "admin")
    assert create_refusal(thief, DEPLOYMENT, stolen) == ""
    host = changed(stolen, (*POD_SPEC, "hostPID"), True)
    assert "namespaces of the host" in dry(thief, DEPLOYMENT, host)
    files = changed(stolen, (*POD_SPEC, "volumes", END), {"name": "w", "hostPath": {"path": "/"}})
    assert "only have volumes" in dry(thief, DEPLOYMENT, files)
    eventually(
        lambda: not [each for each in space.items("deployments") if each["metadata"]["name"] == "nobody"],
        within=60,
        what="the garbage collector",
    )


@pytest.mark.parametrize("case", INSECURE)
def test_what_violates_the_restricted_standard_is_refused_also_from_the_operator(
    case: str, thief: ApiServer, owner: Object
) -> None:
    """The policy and the operator's own check have the same verdict."""
    patch, _ = INSECURE[case]
    unsafe = {**owner, "spec": {**owner["spec"], "podTemplate": {"spec": patch}}}
    built = dict(manifests(unsafe, ANY_TEMPLATE))[DEPLOYMENT]
    try:
        words = dry(thief, DEPLOYMENT, built)
    except KubeError as error:
        # Rejected before admission: privileged containers by this API server, and a Windows process without a network.
        words = str(error)
        assert "privileged" in words or "hostProcess" in words
    else:
        assert re.search(f"the operator's pod templates|{RESTRICTED}|{VOLUME_REFUSED}", words), words


def is_too_large(server: ApiServer, manifest: Object) -> bool:
    return "may have 64 volumes" in dry(server, DEPLOYMENT, manifest)


def test_no_template_is_too_large_for_the_policy_on_templates(thief: ApiServer, owner: Object, space: Space) -> None:
    """An expression beyond the API server's cost limit would let the template pass: the other policy bounds it."""
    item: Object = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "other", "key": "a"}}}
    patch = {"spec": {"containers": [{"name": "engine", "env": [{**item, "name": f"A{n}"} for n in range(600)]}]}}
    space.patch("fgd/chat", {"spec": {"podTemplate": patch}})
    stolen = [{**SECRET_VARIABLE, "name": f"B{number}"} for number in range(32)]
    plain = [{"name": f"C{number}", "value": "x"} for number in range(2001)]
    mine = [{**item, "name": f"D{number}"} for number in range(33)]
    volumes = [{"name": f"v{number}", "emptyDir": {}} for number in range(65)]
    made = deployment(owner)
    largest = changed(made, (*ENGINE, "env"), stolen + plain[: 2000 - 32])
    mounted = made["spec"]["template"]["spec"]["volumes"][:EXTRA]
    largest = changed(largest, (*POD_SPEC, "volumes"), mounted + volumes[: 64 - EXTRA])
    assert "does not name a Secret" in dry(thief, DEPLOYMENT, largest)
    # The other policy must accept what follows: of two rejections, the API server names either.
    made = changed(made, (*POD_SPEC, "volumes"), mounted)
    for path in ((*ENGINE, "env"), (*ENGINE, "volumeMounts"), (*POD_SPEC, "initContainers")):
        made = changed(made, path, [])
    for path, value in (
        ((*ENGINE, "env"), plain),
        ((*ENGINE, "env"), mine),
        ((*ENGINE, "envFrom"), [{"configMapRef": {"name": f"c{number}"}} for number in range(33)]),
        ((*POD_SPEC, "volumes"), volumes),
        (
            (*POD_SPEC, "containers"),
            [
                {**made["spec"]["template"]["spec"]["containers"][0], "name": f"c{number}", "ports": []}
                for number in range(17)
            ],
        ),
    ):
        hostile = changed(made, path, value)
        # The other policy may not have seen the last spec yet.
        eventually(partial(is_too_large, thief, hostile), within=20, what=str(path))


def test_without_the_crd_the_policies_reject_nothing_of_other_users(plane: ControlPlane) -> None:
    """A policy whose parameters are of a missing kind rejects everything that it matches, unless it says Ignore."""
    policies = json.loads(plane.kubectl("get", "validatingadmissionpolicies", "--output=json"))["items"]
    with_parameters = [each["spec"] for each in policies if "paramKind" in each["spec"]]
    assert {spec["failurePolicy"] for spec in with_parameters} == {"Ignore"}
    bindings = json.loads(plane.kubectl("get", "validatingadmissionpolicybindings", "--output=json"))["items"]
    references = [each["spec"]["paramRef"] for each in bindings if "paramRef" in each["spec"]]
    assert {each["parameterNotFoundAction"] for each in references} == {"Allow"}
