"""Two releases of one name, in two namespaces: each has its objects, and its policies to its end."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.commands import CommandError, run
from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import FASTGEN, INFERENCE_POOL, POD_MONITOR, Kind
from fastgen_operator.kube.transport import ApiServer
from harness.chart import CHART, SERVICE_ACCOUNT, Helm
from harness.definitions import INFERENCE_POOL_CRD, POD_MONITOR_CRD
from harness.objects import PLATFORM, manifest
from harness.probes import wait_policies, wait_rights
from harness.space import resource
from harness.user import refusal, server_of
from support.manifests import load_all
from support.namespace import MERGE, Object

KINDS = "priorityclass,clusterrole,clusterrolebinding,validatingadmissionpolicy,validatingadmissionpolicybinding"
# Another release in the same cluster: the CRD is that of the first one.
SECOND = ("--set", "crd.install=false", "--set", "operatorClass=blue")
# Names of the objects without a namespace before they had the namespace of their release in them.
FORMER = "fastgen-operator"
STATUS: Object = {"apiGroups": [FASTGEN.group], "resources": ["fastgendeployments/status"], "verbs": ["patch"]}
OPTIONAL = (POD_MONITOR, INFERENCE_POOL)
SECRET: Object = {"name": "admin", "key": "token"}
# By which Prometheus sends a Secret to the pods, or what it scrapes to another server.
CREDENTIALS: list[Object] = [
    {"authorization": {"credentials": SECRET}},
    {"basicAuth": {"password": SECRET}},
    {"bearerTokenSecret": SECRET},
    {"oauth2": {"clientId": {"secret": SECRET}, "clientSecret": SECRET, "tokenUrl": "http://mine"}},
    {"tlsConfig": {"keySecret": SECRET}},
    {"proxyUrl": "http://mine"},
    {"proxyUrl": "http://mine", "proxyConnectHeader": {"a": [SECRET]}},
    # Prometheus connects to what it sets.
    {"relabelings": [{"targetLabel": "__address__", "replacement": "10.0.0.1:80"}]},
]


@pytest.fixture(scope="module")
def plane(helm: Helm) -> Iterator[ControlPlane]:
    with ControlPlane(helm.program.parent) as started:
        for name in ("one", "two", "shared"):
            started.kubectl("create", "namespace", name)
        yield started


def release(plane: ControlPlane, helm: Helm, verb: str, namespace: str, *args: str, chart: Path = CHART) -> None:
    place = ("--namespace", namespace, f"--kubeconfig={plane.kubeconfig}")
    helm.run(verb, "fastgen", *(() if verb == "uninstall" else (str(chart),)), *place, *args)


def owned(plane: ControlPlane, namespace: str) -> set[str]:
    """Return kind and name of the objects without a namespace that belong to the release of the namespace."""
    found = json.loads(plane.kubectl("get", KINDS, "--output=json"))["items"]
    return {
        f"{each['kind']}/{each['metadata']['name']}"
        for each in found
        if each["metadata"].get("annotations", {}).get("meta.helm.sh/release-namespace") == namespace
    }


def names(namespace: str) -> set[str]:
    base = f"{namespace}.{SERVICE_ACCOUNT}"
    policies = {f"{base}-{name}" for name in ("authors", "limits", "writes", "templates")}
    return {
        *(f"ClusterRole/{base}{end}" for end in ("", "-view", "-edit")),
        f"ClusterRoleBinding/{base}",
        f"PriorityClass/{base}-headroom",
        *(f"ValidatingAdmissionPolicy/{name}" for name in policies),
        *(f"ValidatingAdmissionPolicyBinding/{name}" for name in policies),
    }


@pytest.mark.controlplane
def test_each_of_two_releases_of_one_name_keeps_its_policies_to_its_end(plane: ControlPlane, helm: Helm) -> None:
    release(plane, helm, "install", "one")
    release(plane, helm, "install", "two", *SECOND)
    try:
        assert (owned(plane, "one"), owned(plane, "two")) == (names("one"), names("two"))
        release(plane, helm, "upgrade", "two", *SECOND, "--set", "operator.workers=3")
        # What the upgrade page says about the CRD of a release that is gone takes nothing else.
        release(plane, helm, "upgrade", "two", "--set", "operatorClass=blue", "--take-ownership")
        assert (owned(plane, "one"), owned(plane, "two")) == (names("one"), names("two"))
        release(plane, helm, "uninstall", "one")
        assert (owned(plane, "one"), owned(plane, "two")) == (set(), names("two"))
        release(plane, helm, "install", "one", "--take-ownership")
        assert (owned(plane, "one"), owned(plane, "two")) == (names("one"), names("two"))
    finally:
        release(plane, helm, "uninstall", "two", "--ignore-not-found")
    assert (owned(plane, "one"), owned(plane, "two")) == (names("one"), set())
    release(plane, helm, "uninstall", "one")
    assert owned(plane, "one") == set()


@pytest.mark.controlplane
def test_each_policy_restricts_the_operator_of_its_own_release_and_class(plane: ControlPlane, helm: Helm) -> None:
    release(plane, helm, "install", "one", "--take-ownership")
    release(plane, helm, "install", "two", *SECOND)
    try:
        plane.wait_for_crds("fastgendeployments.fastgen.dev")
        for name, kind in (("plain", None), ("blue", "blue")):
            made = resource(name, **({} if kind is None else {"operatorClass": kind}))
            plane.kubectl("apply", "--namespace", "shared", "--filename", "-", stdin=json.dumps(made))
        role = ("--clusterrole=one.fastgen-operator", "--user=nobody")
        plane.kubectl("create", "clusterrolebinding", "nobody", *role)
        wait_policies(plane)
        for name in ("one", "two"):
            wait_rights(_operator(plane, name), "shared", [STATUS])
        found = {
            (namespace, name): _status_refusal(plane, namespace, name)
            for namespace in ("one", "two")
            for name in ("plain", "blue")
        }
        assert found["one", "plain"] == found["one", "blue"] == found["two", "blue"] == ""
        assert "two.fastgen-operator-writes" in found["two", "plain"]
        assert "of its class" in found["two", "plain"]
    finally:
        release(plane, helm, "uninstall", "two")
        release(plane, helm, "uninstall", "one")


@pytest.mark.controlplane
def test_monitors_and_pools_have_only_the_pods_of_their_resource_and_no_credentials(
    plane: ControlPlane, helm: Helm
) -> None:
    exposed = resource(gateway={"expose": True})
    for definition in (POD_MONITOR_CRD, INFERENCE_POOL_CRD):
        plane.kubectl("apply", "--server-side", "--filename", "-", stdin=json.dumps(definition.fetch()))
    release(plane, helm, "install", "one", "--take-ownership")
    try:
        plane.wait_for_crds(*(f"{kind.plural}.{kind.group}" for kind in (FASTGEN, *OPTIONAL)))
        plane.kubectl("apply", "--namespace", "shared", "--filename", "-", stdin=json.dumps(exposed))
        owner = json.loads(plane.kubectl("get", "--namespace", "shared", "fgd/chat", "--output=json"))
        platform = replace(PLATFORM, optional_kinds=frozenset(OPTIONAL), has_gateway=True)
        made = {kind: manifest(kind, owner, platform) for kind in OPTIONAL}
        endpoint = made[POD_MONITOR]["spec"]["podMetricsEndpoints"][0]
        server = _operator(plane, "one")

        def words(kind: Kind = POD_MONITOR, **spec: object) -> str:
            changed = {**made[kind], "spec": {**made[kind]["spec"], **spec}}
            return refusal(server, "POST", kind.path("shared"), changed, query=[("dryRun", "All")])

        wait_policies(plane)
        for kind in OPTIONAL:
            rule = {"apiGroups": [kind.group], "resources": [kind.plural], "verbs": ["create"]}
            wait_rights(server, "shared", [rule])
            assert words(kind) == ""
            assert "select and create pods" in words(kind, selector={"matchLabels": {"app": "payments"}}), kind.name
        for credentials in CREDENTIALS:
            assert "without credentials" in words(podMetricsEndpoints=[{**endpoint, **credentials}]), credentials
        assert "without credentials" in words(namespaceSelector={"any": True})
    finally:
        release(plane, helm, "uninstall", "one")


def _operator(plane: ControlPlane, namespace: str) -> ApiServer:
    """Return the API server as the operator of the release in the namespace."""
    user = f"system:serviceaccount:{namespace}:{SERVICE_ACCOUNT}"
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
    return server_of(str(plane.kubeconfig_for(f"operator-{namespace}", user, groups)))


def _status_refusal(plane: ControlPlane, namespace: str, name: str) -> str:
    server = _operator(plane, namespace)
    path = FASTGEN.path("shared", name, "status")
    return refusal(server, "PATCH", path, {"status": {"replicas": 1}}, content_type=MERGE)


@pytest.mark.controlplane
def test_an_upgrade_removes_the_objects_of_the_former_names(plane: ControlPlane, helm: Helm, tmp_path: Path) -> None:
    """The chart with the former names stands for the release before."""
    former = tmp_path / "fastgen"
    run(["cp", "--recursive", str(CHART), str(former)])
    helpers = former / "templates" / "_helpers.tpl"
    text, replaced = re.subn(
        r"\{\{- \.Release\.Namespace \}\}\.(?=\{\{ include \"fastgen\.name\")", "", helpers.read_text()
    )
    assert replaced == 1
    helpers.write_text(text)
    release(plane, helm, "install", "one", "--take-ownership", chart=former)
    assert f"ClusterRole/{FORMER}" in owned(plane, "one")
    release(plane, helm, "upgrade", "one")
    assert owned(plane, "one") == names("one")
    release(plane, helm, "uninstall", "one")


def test_releases_share_no_object_but_the_crd(helm: Helm) -> None:
    """Also in a namespace that both watch, and with names that are as long as helm allows."""
    watched = ("--set-json", 'watchNamespaces=["shared"]', "--set", "dashboards.namespace=shared")
    found: Counter[tuple[str, str, str]] = Counter()
    longest = "r" * 53
    pairs = [(name, space) for name in ("fastgen", "a.fastgen", longest) for space in ("one", "two", "n" * 63)]
    for args in ((), watched):
        for name, space in pairs:
            text = helm.run("template", name, str(CHART), "--namespace", space, *args)
            objects: list[Object] = load_all(text)
            for each in objects:
                metadata = each["metadata"]
                key = (each["kind"], metadata.get("namespace", ""), metadata["name"])
                found[key] += each["kind"] not in ("CustomResourceDefinition", "FastGenDeployment")
                assert len(metadata["name"]) <= 253, key
                assert all(
                    len(value) <= 63 for value in metadata.get("labels", {}).values() if isinstance(value, str)
                ), key
        assert set(found.values()) <= {0, 1}, [key for key, count in found.items() if count > 1]
        found.clear()


@pytest.mark.controlplane
def test_a_second_release_is_told_that_it_needs_no_crd(plane: ControlPlane, helm: Helm) -> None:
    release(plane, helm, "install", "one", "--take-ownership")
    try:
        with pytest.raises(CommandError, match="fastgendeployments"):
            release(plane, helm, "install", "two")
    finally:
        release(plane, helm, "uninstall", "one")
