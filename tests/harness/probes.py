"""Requests that store nothing, by which tests learn that the API server has seen a rule of theirs.

The API server watches what it judges by: policies, webhooks, quotas and rights take effect a moment after they are
stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Final
from uuid import uuid4

from fastgen_operator.kinds import DEPLOYMENT, POD, POD_DISRUPTION_BUDGET, SERVICE_ACCOUNT, Kind
from fastgen_operator.kube.transport import ApiServer, KubeError
from support.namespace import CONFIG_MAP, Cluster, Namespace, Object
from support.waiting import eventually

ADMISSION = "admissionregistration.k8s.io"
POLICY: Final = Kind(ADMISSION, "v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies")
BINDING: Final = Kind(ADMISSION, "v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings")
LIMIT_RANGE: Final = Kind("", "v1", "LimitRange", "limitranges")
ACCESS_REVIEW: Final = Kind("authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews")

_SECURE: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
_POD: Object = {
    "containers": [{"name": "c", "image": "i", "securityContext": _SECURE}],
    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
}
_LABELS: Object = {"a": "b"}
# The least that the API server accepts of a kind, in a namespace of the restricted Pod Security Standard.
_LEAST: Final[dict[Kind, Object]] = {
    CONFIG_MAP: {},
    SERVICE_ACCOUNT: {},
    LIMIT_RANGE: {"spec": {"limits": []}},
    POD: {"spec": _POD},
    POD_DISRUPTION_BUDGET: {"spec": {"maxUnavailable": 1, "selector": {"matchLabels": _LABELS}}},
    DEPLOYMENT: {
        "spec": {
            **{"replicas": 0, "selector": {"matchLabels": _LABELS}},
            "template": {"metadata": {"labels": _LABELS}, "spec": _POD},
        }
    },
}


def probe(space: Namespace[Any], kind: Kind, name: str = "probe") -> str:
    """Return the API server's words about a new object of the kind, which is not stored; empty if it is accepted."""
    made = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": name}, **_LEAST[kind]}
    try:
        space.server.request("POST", kind.path(space.name), [("dryRun", "All")], made, "application/json")
    except KubeError as error:
        return str(error)
    return ""


def wait_policies(cluster: Cluster) -> None:
    """Return when the API server judges by all admission policies and bindings as they are stored now.

    It sees changes of each kind in their order, so it has seen those before a policy that it obeys.
    """
    name = f"probe-{uuid4().hex[:8]}"
    place = Namespace(cluster, "default")
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [CONFIG_MAP.plural]}
    specs: dict[Kind, Object] = {
        POLICY: {
            "matchConstraints": {"resourceRules": [rule]},
            "matchConditions": [{"name": "probe", "expression": f"object.metadata.name == '{name}'"}],
            "validations": [{"expression": "false", "message": "seen"}],
        },
        BINDING: {"policyName": name, "validationActions": ["Deny"]},
    }
    for kind, spec in specs.items():
        body = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": name}, "spec": spec}
        place.server.request("POST", kind.path(None), None, body, "application/json")
    try:
        eventually(lambda: probe(place, CONFIG_MAP, name), within=30, what="the policies", every=0.1)
    finally:
        for kind in reversed(specs):
            place.server.request("DELETE", kind.path(None, name), None, {}, "application/json")


def wait_rights(server: ApiServer, namespace: str, rules: list[Object]) -> None:
    """Return when the client of the API server has the rights of a role's rules in the namespace."""
    eventually(lambda: all(_rights(server, namespace, rules)), within=20, what="the user's rights")


def _rights(server: ApiServer, namespace: str, rules: list[Object]) -> Iterator[bool]:
    for rule in rules:
        named = rule.get("resourceNames", [""])
        for group, resource, verb, name in product(rule["apiGroups"], rule["resources"], rule["verbs"], named):
            asked = {"namespace": namespace, "group": group, "resource": resource, "verb": verb, "name": name}
            body = {
                **{"apiVersion": ACCESS_REVIEW.api_version, "kind": ACCESS_REVIEW.name},
                "spec": {"resourceAttributes": asked},
            }
            found = server.request("POST", ACCESS_REVIEW.path(None), None, body, "application/json")
            yield bool(found["status"]["allowed"])
