"""The chart's admission policy on authors: what an author without the right to create pods reaches."""

from __future__ import annotations

import json
from functools import partial

import pytest

from cluster.commands import CommandError
from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import FASTGEN
from fastgen_operator.kube.transport import KubeError
from harness.adverse import bind, node
from harness.chart import CLUSTER_NAME
from harness.hostile import without_limits
from harness.process import OperatorProcess
from harness.space import Space, resource, running
from harness.user import User
from support.namespace import Object
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

NEEDS_PODS = "may not set this without the right to create pods in the namespace: remove it"
PODS: Object = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
SECRETS: Object = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
CLAIMS: Object = {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["update"]}
MINE: Object = {**SECRETS, "resourceNames": ["mine"]}
MY_CLAIMS: Object = {**CLAIMS, "resourceNames": ["mine", "also", "third"]}
ROBOT: Object = {
    **{"apiGroups": [""], "resources": ["serviceaccounts"]},
    **{"resourceNames": ["robot"], "verbs": ["impersonate"]},
}
CLASSES: list[Object] = [
    {"apiGroups": [group], "resources": [kind], "resourceNames": ["mine"], "verbs": ["use"]}
    for group, kind in (("scheduling.k8s.io", "priorityclasses"), ("node.k8s.io", "runtimeclasses"))
]


def hub(**model: object) -> Object:
    return {"model": {"source": "hf://tests/tiny", **model}}


def patched(**pod: object) -> Object:
    return {"podTemplate": {"spec": pod}}


def engine(**container: object) -> Object:
    return patched(containers=[{"name": "engine", **container}])


def volume(**source: object) -> Object:
    return patched(volumes=[{"name": "v", **source}])


def claim(name: str) -> Object:
    return {"persistentVolumeClaim": {"claimName": name}}


VOLUMES, CONTAINERS, PULLS = (
    f"spec.podTemplate.spec.{field}: must not name a Secret" for field in ("volumes", "containers", "imagePullSecrets")
)
# What names a Secret, and the field in the message.
SECRET: list[tuple[Object, str]] = [
    (hub(secretName="other"), "spec.model.secretName: "),
    ({"apiKeySecretName": "other"}, "spec.apiKeySecretName: "),
    (patched(imagePullSecrets=[{"name": "other"}]), PULLS),
    (volume(secret={"secretName": "other"}), VOLUMES),
    # Merged with the operator's volume of this name, or with none.
    (patched(volumes=[{"name": "api-keys", "secret": {"items": []}}]), VOLUMES),
    (volume(projected={"sources": [{"configMap": {}}, {"secret": {"name": "other"}}]}), VOLUMES),
    (engine(env=[{"name": "A", "value": "b"}, {"name": "B", "valueFrom": {"secretKeyRef": {}}}]), CONTAINERS),
    (engine(envFrom=[{"configMapRef": {}}, {"secretRef": {"name": "other"}}]), CONTAINERS),
    (patched(initContainers=[{"name": "fetch", "envFrom": [{"secretRef": {"name": "other"}}]}]), CONTAINERS),
]
# What uses another ServiceAccount than the resource's own, without rights.
ACCOUNT: list[Object] = [
    patched(serviceAccountName="admin"),
    patched(serviceAccount="admin"),
    patched(serviceAccountName=None),
    patched(serviceAccountName={"$patch": "delete"}),
]
CLAIM: list[tuple[Object, str]] = [
    ({"model": {"source": "pvc://other/model"}}, "spec.model.source: "),
    (volume(**claim("other")), "spec.podTemplate.spec.volumes: "),
    # Without a cache, the operator does not create a claim of the resource's name.
    (volume(**claim("chat")), "spec.podTemplate.spec.volumes: "),
]
CLASS: list[tuple[Object, str]] = [
    (make(name), f"spec.scheduling.{name}")
    for name in ("priorityClassName", "runtimeClassName")
    for make in (
        lambda name: {"scheduling": {name: "other"}},
        lambda name: patched(**{name: "other"}),
        lambda name: {"scheduling": {name: "mine"}, **patched(**{name: "other"})},
    )
]
# What takes a node, or reaches what is not the author's, without naming a Secret: tests/operator/api/test_pod_fields.py
# has every field. Here are the ways around a list of fields.
AROUND: list[Object] = [
    patched(**{"$patch": "replace", "containers": []}),
    patched(**{"$retainKeys": ["containers"]}),
    patched(securityContext=None),
    patched(securityContext={"$patch": "delete"}),
    patched(securityContext={"runAsNonRoot": None}),
    patched(securityContext={"runAsUser": "0"}),
    patched(securityContext={"runAsUser": 0.5}),
    patched(automountServiceAccountToken=None),
    patched(automountServiceAccountToken={"$patch": "delete"}),
    patched(volumes=[{"name": "v", "emptyDir": {}, "hostPath": {"path": "/"}}]),
    patched(volumes=[{"name": "models", "image": {"reference": "registry.example/other:1"}}]),
    patched(volumes=[{"name": "v", "emptyDir": {}}, {"$patch": "replace"}, {"name": "w", "hostPath": {"path": "/"}}]),
    patched(volumes={"name": "v", "hostPath": {"path": "/"}}),
    patched(volumes=["v"]),
    patched(containers="engine"),
    patched(initContainers={"name": "fetch"}),
    patched(imagePullSecrets="registry"),
    engine(envFrom=[{"prefix": "A_", "ofTheNextVersion": {"name": "other"}}]),
    patched(containers=[{"$patch": "replace"}, {"name": "engine", "image": "mine:1"}]),
    patched(containers=[{"name": "engine"}, {"name": "mine", "image": "mine:1"}]),
    patched(containers=[{"image": "mine:1"}]),
    patched(initContainers=[{"name": "mine", "image": "mine:1", "restartPolicy": "Always"}]),
    patched(initContainers=[{"name": "engine", "image": "mine:1"}]),
    patched(ephemeralContainers=[{"name": "mine", "image": "mine:1"}]),
    engine(**{"$patch": "replace"}),
    engine(**{"$retainKeys": ["name"]}),
    engine(securityContext=None),
    engine(securityContext={"$patch": "replace"}),
    engine(securityContext={"capabilities": None}),
    engine(env={"name": "A", "valueFrom": {"secretKeyRef": {}}}),
    engine(env=[["A"]]),
    engine(env=[{"name": "A", "valueFrom": ["secretKeyRef"]}]),
    engine(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
    engine(livenessProbe=["httpGet"]),
    engine(ports=[{"name": "p", "containerPort": 1, "hostPort": 1}]),
    {"podTemplate": {"metadata": {"annotations": {"io.kubernetes.cri-o.Devices": "/dev/sda"}}}},
    {"podTemplate": {"metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/engine": "x"}}}},
    {"podTemplate": {"metadata": {"annotations": {"sidecar.istio.io/proxyImage": "mine:1"}}}},
    {"podTemplate": {"metadata": {"labels": {"azure.workload.identity/use": "true"}}}},
]
HARMLESS: list[Object] = [
    {},
    hub(),
    hub(secretName="mine"),
    {"apiKeySecretName": "mine"},
    {"engine": {"device": "cpu", "image": "mine:1"}},
    {"model": {"source": "pvc://mine/model"}},
    {"model": {"source": "oci://registry.example/models/smollm2:1"}},
    {**hub(), "cache": {"size": "1Gi"}, **volume(**claim("chat"))},
    {"scheduling": {"priorityClassName": "mine", "runtimeClassName": "mine"}},
    patched(priorityClassName="mine", runtimeClassName=None),
    patched(serviceAccountName="chat", nodeSelector={"a": "b"}),
    patched(serviceAccountName="robot"),
    patched(volumes=None, imagePullSecrets=None, hostPID=False),
    patched(volumes=[{"name": "v", "emptyDir": {}}, {"name": "w", "projected": {"sources": [{"downwardAPI": {}}]}}]),
    patched(volumes=[{"name": "cache", "$patch": "delete"}], imagePullSecrets={"$patch": "delete"}),
    volume(**claim("mine")),
    engine(env=[{"name": "A", "value": "b"}, {"name": "B", "valueFrom": {"configMapKeyRef": {}}}]),
    {"podTemplate": {"metadata": {"labels": {"team": "search", "app.kubernetes.io/part-of": "chat"}}}},
    {"podTemplate": {"metadata": {"annotations": {"note": "yes", "prometheus.io/scrape": "true"}}}},
]


SEVERAL = patched(volumes=[{"name": name, **claim(name)} for name in ("mine", "also", "third")])


def test_an_author_reaches_only_what_the_author_may_reach(space: Space) -> None:
    alice = User(space, "alice", [MINE, MY_CLAIMS, ROBOT, *CLASSES])
    eventually(lambda: alice.refusal(apiKeySecretName="other"), within=20, what="the policy")
    for spec, field in (*SECRET, *CLAIM, *CLASS):
        words = alice.refusal(**spec)
        assert field in words, spec
        assert alice.name in words, spec
    assert "or not all of several" in alice.refusal(**SEVERAL), "needs the right to all claims"
    for spec in ACCOUNT:
        assert "spec.podTemplate.spec.serviceAccountName: " in alice.refusal(**spec), spec
    for spec in AROUND:
        assert "denied request" in alice.refusal(**spec), spec
    for spec in HARMLESS:
        assert alice.refusal(**spec) == "", spec


def test_rights_on_secrets_claims_or_pods_are_enough(space: Space) -> None:
    reader, creator = User(space, "reader", [SECRETS, CLAIMS]), User(space, "creator", [PODS])
    eventually(lambda: reader.refusal(**patched(serviceAccountName="admin")), within=20, what="the policy")
    for spec in (*(spec for spec, _ in (*SECRET, *CLAIM)), SEVERAL):
        assert reader.refusal(**spec) == "", spec
    for spec in ACCOUNT:
        assert "may neither create pods nor impersonate the ServiceAccount" in reader.refusal(**spec), spec
    for spec in (*(spec for spec, _ in (*SECRET, *CLAIM, *CLASS)), *ACCOUNT, *AROUND, *HARMLESS, SEVERAL):
        assert creator.refusal(**spec) == "", spec


def test_the_largest_template_costs_an_author_nothing_but_a_rejection_or_acceptance(
    space: Space,
) -> None:
    """The API server bounds the cost of a policy; an expression beyond it rejects the request."""
    alice = User(space, "alice")
    eventually(lambda: alice.refusal(apiKeySecretName="other"), within=20, what="the policy")
    many = [{"name": f"A{number}", "value": "x"} for number in range(999)]
    assert alice.refusal(**engine(env=many)) == ""
    more = engine(env=[*many, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}])
    assert CONTAINERS in alice.refusal(**more)
    assert NEEDS_PODS in alice.refusal(**patched(**{f"field{number}": 1 for number in range(900)}))
    # Not evaluated: the API server would take half a minute. The policy on sizes may answer first, with 422.
    try:
        words = alice.refusal(**engine(env=[{"name": f"A{number}"} for number in range(50_000)]))
    except KubeError as error:
        words = str(error) if error.status == 422 else ""
    assert "characters" in words
    # What is too large to be checked is rejected, also where nothing else bounds it.
    with without_limits(space):
        words = alice.refusal(**engine(env=[{"name": f"A{number}"} for number in range(5_000)]))
        assert "spec.podTemplate: has more than 65536 characters" in words


def test_what_another_author_named_cannot_be_reached_by_a_change_of_the_image(space: Space) -> None:
    alice = User(space, "alice")
    space.apply(resource(apiKeySecretName="other", podTemplate={"spec": {"hostNetwork": False, "nodeName": "n"}}))
    stolen: Object = {"spec": {"engine": {"image": "mine:1"}}}
    eventually(lambda: alice.patch_refusal(stolen), within=20, what="the policy")
    assert "spec.apiKeySecretName: " in alice.patch_refusal(stolen)
    assert alice.patch_refusal({"metadata": {"labels": {"team": "search"}}}) == "", "the spec does not change"
    assert alice.patch_refusal({"spec": {"replicas": 2}}, "scale") == ""
    without = {**stolen["spec"], "apiKeySecretName": None}
    assert f"spec.podTemplate.spec.nodeName: {alice.name} {NEEDS_PODS}" in alice.patch_refusal({"spec": without})
    assert alice.patch_refusal({"spec": {**without, "podTemplate": None}}) == ""


def test_a_rejection_names_the_field_the_user_and_the_right(space: Space) -> None:
    """With GitOps, the user is the service account of a controller. Both are tried as the page says."""
    alice, robot = User(space, "alice").name, f"system:serviceaccount:{space.name}:robot"
    for role in ("view", "edit"):
        named = f"--clusterrole={CLUSTER_NAME}-{role}"
        space.kubectl("create", "rolebinding", role, named, f"--user={alice}", f"--user={robot}")
    made = json.dumps(resource(apiKeySecretName="other"))

    def is_named(name: str) -> bool:
        with pytest.raises(CommandError) as refused:
            space.kubectl("apply", "--dry-run=server", f"--as={name}", "--filename", "-", stdin=made)
        return f"denied request: spec.apiKeySecretName: {name} may not get the Secret other" in str(refused.value)

    for name in (alice, robot):
        eventually(partial(is_named, name), within=20, what=name)


def test_the_labels_of_an_author_decide_which_services_and_policies_select_the_pods(
    plane: ControlPlane, space: Space, operator: OperatorProcess
) -> None:
    del operator
    alice = User(space, "alice")
    space.kubectl("create", "service", "clusterip", "payments", "--tcp=80:8000")
    made = resource(podTemplate={"metadata": {"labels": {"app": "payments"}}})
    alice.server.request("POST", FASTGEN.path(space.name), None, made, "application/json")
    (pod,) = space.wait_pods(1)

    def receives() -> bool:
        slices = space.items("endpointslices", labels="kubernetes.io/service-name=payments")
        return any(each["addresses"] == ["10.0.0.7"] for found in slices for each in found["endpoints"] or ())

    with node(plane, space.name):
        bind(space, pod, space.name)
        status = {**running(ready=True), "podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}]}
        space.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")
        eventually(receives, within=20, what="the traffic of the other Service")
    policies = [each["spec"]["podSelector"] for each in space.items("networkpolicies")]
    assert policies == [{"matchLabels": {"fastgen.dev/deployment": "chat"}}], "its own, which the labels do not change"
