"""The chart's admission policy: an author reaches no Secrets or ServiceAccounts without the right to."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import load_kube_config

from fastgen_operator.kinds import FASTGEN
from fastgen_operator.kube.transport import ApiServer, KubeError
from fastgen_operator.metrics import Metrics
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

AUTHOR: Object = {"apiGroups": ["fastgen.dev"], "resources": ["fastgendeployments"], "verbs": ["create", "patch"]}
PODS: Object = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
SECRETS: Object = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
MINE: Object = {**SECRETS, "resourceNames": ["mine"]}
ROBOT: Object = {
    **{"apiGroups": [""], "resources": ["serviceaccounts"]},
    **{"resourceNames": ["robot"], "verbs": ["impersonate"]},
}


class User:
    """A user whose only rights in the namespace are these rules."""

    def __init__(self, space: Space, name: str, rules: Sequence[Object]) -> None:
        self.space, self.name = space, f"{name}-{space.name}"
        metadata = {"name": name, "namespace": space.name}
        api = "rbac.authorization.k8s.io"
        role = {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": metadata, "rules": [AUTHOR, *rules]}
        binding = {
            **{"apiVersion": f"{api}/v1", "kind": "RoleBinding", "metadata": metadata},
            "roleRef": {"apiGroup": api, "kind": "Role", "name": name},
            "subjects": [{"apiGroup": api, "kind": "User", "name": self.name}],
        }
        for obj in (role, binding):
            space.kubectl("create", "--filename", "-", stdin=json.dumps(obj))
        configuration = Configuration()
        file = str(space.cluster.kubeconfig_for(self.name, self.name))
        load_kube_config(file, client_configuration=configuration)  # type: ignore[no-untyped-call]
        self.server = ApiServer(ApiClient(configuration), Metrics(), 30)

    def refusal(self, **spec: object) -> str:
        """Return the API server's words about a new resource, without creating it; empty if it is accepted."""
        path = FASTGEN.path(self.space.name)
        return self._refusal("POST", path, resource(**spec), "application/json", [("dryRun", "All")])

    def patch_refusal(self, patch: Object) -> str:
        """Return the API server's words about a patch of the resource `chat`, which it makes if it accepts it."""
        return self._refusal("PATCH", FASTGEN.path(self.space.name, "chat"), patch, "application/merge-patch+json", [])

    def _refusal(self, method: str, path: str, body: Object, kind: str, query: list[tuple[str, str]]) -> str:
        try:
            self.server.request(method, path, query, body, kind)
        except KubeError as error:
            if error.status != 403:
                raise
            return str(error)
        return ""


def hub(**model: object) -> Object:
    return {"model": {"source": "hf://tests/tiny", **model}}


def patched(**pod: object) -> Object:
    return {"podTemplate": {"spec": pod}}


def engine(**container: object) -> Object:
    return patched(containers=[{"name": "engine", **container}])


VOLUMES, CONTAINERS, PULLS = (
    f"spec.podTemplate.spec.{field}: " for field in ("volumes", "containers", "imagePullSecrets")
)
# What names a Secret, and the field in the message.
SECRET: list[tuple[Object, str]] = [
    (hub(secretName="other"), "spec.model.secretName: "),
    ({"apiKeySecretName": "other"}, "spec.apiKeySecretName: "),
    (patched(imagePullSecrets=[{"name": "other"}]), PULLS),
    (patched(volumes=[{"name": "v", "secret": {"secretName": "other"}}]), VOLUMES),
    (
        patched(volumes=[{"name": "v", "projected": {"sources": [{"configMap": {}}, {"secret": {"name": "other"}}]}}]),
        VOLUMES,
    ),
    (
        patched(volumes=[{"name": "v", "csi": {"nodePublishSecretRef": {"name": "other"}}}]),
        VOLUMES,
    ),
    (patched(volumes=[{"name": "v", "iscsi": {"secretRef": {"name": "other"}}}]), VOLUMES),
    (
        engine(env=[{"name": "A", "value": "b"}, {"name": "B", "valueFrom": {"secretKeyRef": {}}}]),
        CONTAINERS,
    ),
    (
        patched(initContainers=[{"name": "i", "envFrom": [{"secretRef": {"name": "other"}}]}]),
        CONTAINERS,
    ),
]
# What uses another ServiceAccount than the resource's own, without rights.
ACCOUNT: list[Object] = [
    patched(serviceAccountName="admin"),
    patched(serviceAccount="admin"),
    patched(serviceAccountName=None),
    patched(**{"$patch": "replace", "containers": []}),
    patched(**{"$retainKeys": ["containers"]}),
]
HARMLESS: list[Object] = [
    {},
    hub(),
    hub(secretName="mine"),
    {"apiKeySecretName": "mine"},
    patched(serviceAccountName="chat", nodeSelector={"a": "b"}),
    patched(serviceAccountName="robot"),
    engine(env=[{"name": "A", "value": "b"}, {"name": "B", "valueFrom": {"configMapKeyRef": {}}}]),
    patched(volumes=[{"name": "v", "emptyDir": {}}, {"name": "w", "projected": {"sources": [{"downwardAPI": {}}]}}]),
    patched(volumes=None, containers="not a list"),
]


def test_an_author_reaches_only_what_the_author_may_read(space: Space) -> None:
    alice = User(space, "alice", [MINE, ROBOT])
    eventually(lambda: alice.refusal(apiKeySecretName="other"), within=20, what="the policy")
    for spec, field in SECRET:
        words = alice.refusal(**spec)
        assert field in words, spec
        assert alice.name in words
    for spec in ACCOUNT:
        assert "spec.podTemplate.spec.serviceAccountName: " in alice.refusal(**spec), spec
    for spec in HARMLESS:
        assert alice.refusal(**spec) == "", spec


def test_rights_on_secrets_or_pods_are_enough(space: Space) -> None:
    reader, creator = User(space, "reader", [SECRETS]), User(space, "creator", [PODS])
    eventually(lambda: reader.refusal(**patched(serviceAccountName="admin")), within=20, what="the policy")
    for spec in (*(spec for spec, _ in SECRET), *HARMLESS[:4]):
        assert reader.refusal(**spec) == "", spec
    for spec in ACCOUNT:
        assert "may neither create pods nor impersonate the ServiceAccount" in reader.refusal(**spec), spec
    for spec in (*(spec for spec, _ in SECRET), *ACCOUNT, *HARMLESS):
        assert creator.refusal(**spec) == "", spec


def test_a_secret_that_another_author_named_cannot_be_reached_by_a_change_of_the_image(space: Space) -> None:
    alice = User(space, "alice", [])
    space.apply(resource(apiKeySecretName="other"))
    stolen: Object = {"spec": {"engine": {"image": "mine:1"}}}
    eventually(lambda: alice.patch_refusal(stolen), within=20, what="the policy")
    assert "spec.apiKeySecretName: " in alice.patch_refusal(stolen)
    assert alice.patch_refusal({"metadata": {"labels": {"team": "search"}}}) == "", "the spec does not change"
    assert alice.patch_refusal({"spec": {**stolen["spec"], "apiKeySecretName": None}}) == ""
