"""Rules of the chart's admission policies that exist only with other values than the default ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN
from fastgen_operator.kube.transport import ApiServer
from harness.chart import install, operator_kubeconfig
from harness.process import OperatorProcess
from harness.space import Space, resource
from harness.thief import END, ENGINE, POD_SPEC, changed, deployment, dry, thief_of
from harness.user import User, refusal
from support.namespace import MERGE, Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

VALUES = (
    *("--set", "operatorClass=blue", "--set", "podTemplate=any", "--set", "engine.imagePullSecrets={registry}"),
    *("--set", "admissionPolicy.engineImages={registry.example/fastgen/,mirror.example/}"),
    *("--set", "admissionPolicy.modelImages={registry.example/models/}"),
    *("--set", "admissionPolicy.podLabels={example.com/}", "--set", "admissionPolicy.podAnnotations={example.com/a}"),
)
PODS: Object = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
# Changes of a Deployment whose FastGenDeployment has no podTemplate, and the words that refuse them.
INSECURE: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "the host's network": ((*POD_SPEC, "hostNetwork"), True, "namespaces of the host"),
    "the host's processes": ((*POD_SPEC, "hostPID"), True, "namespaces of the host"),
    "no AppArmor": (
        ("spec", "template", "metadata", "annotations"),
        {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"},
        "may not leave AppArmor",
    ),
    "a pod of root": ((*POD_SPEC, "securityContext", "runAsUser"), 0, "pod templates must be restricted"),
    "an engine of root": ((*ENGINE, "securityContext", "runAsUser"), 0, "containers of the operator"),
    "another container": ((*POD_SPEC, "containers", END), {"name": "x", "image": "x"}, "containers of the operator"),
}


@pytest.fixture(scope="module")
def thief(plane: ControlPlane) -> Iterator[ApiServer]:
    """Somebody with the credentials of an operator of these values."""
    install(plane, *VALUES)
    yield thief_of(plane)
    install(plane)


@pytest.fixture
def owner(space: Space, thief: ApiServer) -> Object:
    """A FastGenDeployment of the operator's class, once the policies of these values judge it."""
    space.apply(resource("plain"))
    space.apply(resource(operatorClass="blue"))
    plain, found = (space.get("fgd", name) for name in ("plain", "chat"))
    eventually(lambda: "of another class" in dry(thief, DEPLOYMENT, deployment(plain)), within=20, what="the policies")
    # The API server may see either resource first.
    other = changed(deployment(found), ("metadata", "ownerReferences", 0, "uid"), "other")
    eventually(lambda: "another FastGenDeployment" in dry(thief, DEPLOYMENT, other), within=20, what="the resource")
    return found


def test_an_operator_writes_only_children_and_statuses_of_its_class(
    space: Space, thief: ApiServer, owner: Object
) -> None:
    assert dry(thief, DEPLOYMENT, deployment(owner)) == ""
    status: Object = {"status": {"replicas": 1}}
    assert refusal(thief, "PATCH", FASTGEN.path(space.name, "chat", "status"), status, content_type=MERGE) == ""
    path = FASTGEN.path(space.name, "plain", "status")
    assert "of FastGenDeployments of its class" in refusal(thief, "PATCH", path, status, content_type=MERGE)


@pytest.mark.parametrize("case", INSECURE)
def test_a_template_is_restricted_unless_the_spec_has_one_of_its_own(
    case: str, space: Space, thief: ApiServer, owner: Object
) -> None:
    path, value, words = INSECURE[case]
    assert words in dry(thief, DEPLOYMENT, changed(deployment(owner), path, value))
    space.patch("fgd/chat", {"spec": {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}})
    asked = changed(deployment(space.get("fgd", "chat")), path, value)
    eventually(lambda: dry(thief, DEPLOYMENT, asked) == "", within=20, what="a template of its own")


def test_pull_secrets_of_the_chart_may_be_used_and_no_others(thief: ApiServer, owner: Object) -> None:
    made = changed(deployment(owner), (*POD_SPEC, "imagePullSecrets"), [{"name": "registry"}])
    assert dry(thief, DEPLOYMENT, made) == ""
    other = changed(made, (*POD_SPEC, "imagePullSecrets", END), {"name": "admin"})
    assert "image pull Secret" in dry(thief, DEPLOYMENT, other)


def test_authors_use_only_the_images_labels_and_annotations_of_the_chart(space: Space, thief: ApiServer) -> None:
    del thief
    alice, creator = User(space, "alice"), User(space, "creator", [PODS])

    def image(name: str) -> Object:
        return {"engine": {"device": "cpu", "image": name}}

    def metadata(**of: Object) -> Object:
        return {"podTemplate": {"metadata": of}}

    eventually(lambda: alice.refusal(**image("mine:1")), within=20, what="the policy")
    for name in ("mine:1", "registry.example/fastgen", "evil.example/registry.example/fastgen/x"):
        words = alice.refusal(**image(name))
        assert "spec.engine.image: " in words, name
        assert "registry.example/fastgen/, mirror.example/" in words, name
    for name in ("registry.example/fastgen/engine:1", "mirror.example/x@sha256:0"):
        assert alice.refusal(**image(name)) == "", name
    assert alice.refusal() == "", "the operator's own"
    for source in ("oci://registry.example/other:1", "oci://evil.example/registry.example/models/x:1"):
        words = alice.refusal(model={"source": source})
        assert "spec.model.source: " in words, source
        assert "registry.example/models/" in words, source
    for source in ("oci://registry.example/models/x:1#/x.gguf", "hf://tests/tiny"):
        assert alice.refusal(model={"source": source}) == "", source
    eventually(lambda: creator.refusal(**image("mine:1")) == "", within=20, what="the right to create pods")
    for allowed in (metadata(labels={"example.com/x": "1"}), metadata(annotations={"example.com/a": "1"})):
        assert alice.refusal(**allowed) == "", allowed
    for refused in (
        metadata(labels={"app.kubernetes.io/x": "1"}),
        metadata(annotations={"example.com/ab": "1"}),
        metadata(annotations={"prometheus.io/scrape": "true"}),
    ):
        assert "whose key belongs to another component" in alice.refusal(**refused), refused
    # The operator passes these labels of a resource on to its pods, and these values of the chart leave them out.
    queued: Object = {"labels": {"kueue.x-k8s.io/queue-name": "theirs"}}
    named = resource()
    words = alice.refusal_of({**named, "metadata": {**named["metadata"], **queued}})
    assert "metadata.labels.kueue.x-k8s.io/queue-name, which the pods get" in words
    space.apply(resource())
    assert "queue-name, which the pods get" in alice.patch_refusal({"metadata": queued})
    assert alice.patch_refusal({"metadata": {"labels": {"team": "search"}}}) == ""
    assert creator.patch_refusal({"metadata": queued}) == ""
    assert alice.patch_refusal({"metadata": {"labels": {"team": "chat"}}}) == "", "it was another user's"


def test_templates_of_any_kind_take_the_node(
    plane: ControlPlane, space: Space, thief: ApiServer, owner: Object, tmp_path: Path
) -> None:
    """Those of authors who may create pods, and of the operator's credentials with an owner that does not exist."""
    files: Object = {"name": "host", "hostPath": {"path": "/"}}
    pod: Object = {"hostNetwork": True, "volumes": [files]}
    alice, creator = User(space, "alice"), User(space, "creator", [PODS])
    assert "denied request: spec.podTemplate" in alice.refusal(podTemplate={"spec": pod})
    space.kubectl("label", "namespace", space.name, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    made = resource("node", operatorClass="blue", podTemplate={"spec": pod})
    creator.server.request("POST", FASTGEN.path(space.name), None, made, "application/json")
    arguments = ("--namespace", space.name, "--operator-class", "blue", "--pod-template", "any")
    operator = OperatorProcess(operator_kubeconfig(plane), tmp_path / "log", arguments)
    operator.start()
    try:
        (found,) = space.wait_pods(1, "node")
        assert found["spec"]["hostNetwork"]
        assert [each["hostPath"]["path"] for each in found["spec"]["volumes"] if "hostPath" in each] == ["/"]
        assert space.wait_condition("PodsRestricted", "False", None, "node")
    finally:
        operator.abandon()
    nobody = {**owner, "metadata": {**owner["metadata"], "name": "nobody", "uid": "made-up"}}
    stolen = changed(deployment(nobody), (*POD_SPEC, "volumes", END), files)
    assert dry(thief, DEPLOYMENT, changed(stolen, (*POD_SPEC, "hostPID"), True)) == ""
