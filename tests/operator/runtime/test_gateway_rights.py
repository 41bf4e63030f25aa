"""What the gateway's credentials reach at a real API server."""

from __future__ import annotations

import json

import pytest
import yaml

from cluster.commands import run
from cluster.controlplane import ControlPlane
from harness.chart import SYSTEM, Helm

pytestmark = pytest.mark.controlplane

ACCOUNT = "fastgen-gateway"
MAY = {
    (group, resource, verb)
    for group, resource in (("fastgen.dev", "fastgendeployments"), ("discovery.k8s.io", "endpointslices"))
    for verb in ("list", "watch")
}
# What every user may do: ask about itself.
ABOUT_ITSELF = {"authorization.k8s.io", "authentication.k8s.io"}


def test_the_gateways_credentials_read_two_kinds_and_write_nothing(plane: ControlPlane) -> None:
    rendered = Helm(plane.programs / "helm").render("--set", "gateway.enabled=true")
    objects = [
        obj
        for obj in rendered
        if obj["kind"] in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
        and obj["metadata"]["name"].endswith(ACCOUNT)
    ]
    assert len(objects) == 3
    plane.kubectl("apply", "--server-side", "--filename", "-", stdin=yaml.safe_dump_all(objects))
    groups = ["system:authenticated", "system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}"]
    kubeconfig = plane.kubeconfig_for(ACCOUNT, f"system:serviceaccount:{SYSTEM}:{ACCOUNT}", groups)
    # Rights on all namespaces are among those on one.
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": SYSTEM}}
    command = ("create", "--validate=false", "--filename", "-", "--output", "json")
    said = run([plane.programs / "kubectl", f"--kubeconfig={kubeconfig}", *command], stdin=json.dumps(review))
    found = json.loads(said)["status"]
    assert not found["incomplete"]
    rights = {
        (group, resource, verb)
        for rule in found["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {right for right in rights if right[0] not in ABOUT_ITSELF} == MAY
