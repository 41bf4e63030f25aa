"""What authors and the operator's credentials reach without the chart's admission policies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, NETWORK_POLICY, POD, SERVICE
from harness.chart import install
from harness.process import OperatorProcess
from harness.space import Space, resource
from harness.thief import END, POD_SPEC, changed, children, dry, thief_of
from harness.user import User, create_refusal, refusal
from support.namespace import Object

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

POLICIES = "validatingadmissionpolicy,validatingadmissionpolicybinding"
STOLEN: Object = {"name": "stolen", "secret": {"secretName": "admin"}}


@pytest.fixture(scope="module", autouse=True)
def unprotected(plane: ControlPlane) -> Iterator[None]:
    """Install the chart without its policies, and with them again afterwards."""
    plane.kubectl("delete", POLICIES, "--selector", "app.kubernetes.io/instance=fastgen")
    install(plane, "--set", "admissionPolicy.enabled=false")
    assert plane.kubectl("get", POLICIES, "--output=name") == ""
    yield
    install(plane)
    assert len(plane.kubectl("get", POLICIES, "--output=name").splitlines()) == 8


def apply(user: User, **spec: Object) -> None:
    """Create the resource `chat` as the user. Raises KubeError."""
    path = FASTGEN.path(user.space.name)
    user.server.request("POST", path, None, resource(**spec), "application/json")


def test_an_author_reaches_what_any_pod_of_the_namespace_does(space: Space, own_operator: OperatorProcess) -> None:
    """Also without any other right in the namespace than the chart's edit role."""
    space.kubectl("create", "serviceaccount", "admin")
    alice = User(space, "alice")
    account = {"serviceAccountName": "admin", "automountServiceAccountToken": True}
    apply(alice, podTemplate={"spec": {**account, "volumes": [STOLEN]}})
    (pod,) = space.wait_pods(1)
    assert pod["spec"]["serviceAccountName"] == "admin"
    assert {volume["name"]: volume for volume in pod["spec"]["volumes"]}["stolen"]["secret"]["secretName"] == "admin"
    sources = [source for volume in pod["spec"]["volumes"] for source in volume.get("projected", {}).get("sources", [])]
    assert any("serviceAccountToken" in source for source in sources)
    assert own_operator.is_healthy()


def test_the_operator_still_refuses_templates_that_violate_the_restricted_standard(
    space: Space, own_operator: OperatorProcess
) -> None:
    apply(User(space, "alice"), podTemplate={"spec": {"hostPID": True}})
    words = space.wait_condition("Ready", "False", "PodTemplateRefused")["message"]
    assert "hostPID must be false" in words
    assert space.pods() == []
    assert own_operator.is_healthy()


def test_the_operators_credentials_reach_every_secret_through_a_pod(plane: ControlPlane, space: Space) -> None:
    """And all that its role allows; but they read no Secret, and create no pod themselves."""
    thief = thief_of(plane)
    space.apply(resource())
    made = children(space.get("fgd", "chat"))
    for namespace in (space.name, "kube-system", "default"):
        for kind in (DEPLOYMENT, SERVICE, NETWORK_POLICY):
            moved = changed(made[kind], ("metadata", "namespace"), namespace)
            assert dry(thief, kind, changed(moved, ("metadata", "ownerReferences"), [])) == "", (kind.name, namespace)
    mine = changed(changed(made[DEPLOYMENT], ("metadata", "ownerReferences"), []), ("metadata", "name"), "mine")
    mine = changed(mine, (*POD_SPEC, "serviceAccountName"), "default")
    assert create_refusal(thief, DEPLOYMENT, changed(mine, (*POD_SPEC, "volumes", END), STOLEN)) == ""
    # The pods have the label of `chat`, whose operator does not run.
    (pod,) = space.wait_pods(1)
    assert STOLEN["secret"].items() <= pod["spec"]["volumes"][-1]["secret"].items()
    assert 'cannot list resource "secrets"' in refusal(thief, "GET", f"/api/v1/namespaces/{space.name}/secrets")
    assert 'cannot create resource "pods"' in refusal(thief, "POST", POD.path(space.name), {})
