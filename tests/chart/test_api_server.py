"""A real API server accepts what the chart renders, and keeps the CRD and its resources through reinstalls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from chart_files.files import ROOT
from cluster.commands import CommandError
from cluster.controlplane import ControlPlane
from harness.chart import CHART, CRD_CHART, SYSTEM, Helm
from harness.definitions import (
    HTTP_ROUTE_CRD,
    POD_MONITOR_CRD,
    PROMETHEUS_RULE_CRD,
    SCALED_OBJECT_CRD,
    SERVICE_MONITOR_CRD,
)
from harness.space import resource
from support.manifests import dump_all, load_all
from support.namespace import Object
from support.pages import commands, documents
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

CRD = "crd/fastgendeployments.fastgen.dev"
GATEWAY_ARGUMENTS = {
    *("image", "envoyImage", "logFormat", "holdSeconds", "maxHeldRequests", "drainSeconds", "networkPolicy.enabled"),
    *(f"resources.{name}" for name in ("requests.cpu", "requests.memory", "limits.memory")),
    *(f"envoyResources.{name}" for name in ("requests.cpu", "requests.memory", "limits.memory")),
}
# One rendering each. Together they use every value.
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one namespace": {"watchNamespaces": ["one", "two"], "operatorClass": "blue", "crd": {"install": False}},
    "highly available": {
        "operator": {
            "replicas": 2,
            "priorityClassName": "system-cluster-critical",
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "affinity": {"nodeAffinity": {}},
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "podAnnotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": "tmp,more"},
            "tolerations": [{"key": "system", "operator": "Exists", "effect": "NoSchedule"}],
        }
    },
    "monitored": {
        "operator": {"podMonitor": {"enabled": True}, "networkPolicy": {"enabled": True}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "monitoring": {"podMonitorLabels": {"release": "prometheus"}},
        "dashboards": {"namespace": "one", "annotations": {"folder": "FastGen"}},
    },
    "monitored by a Service": {
        "operator": {"serviceMonitor": {"enabled": True}},
        "prometheusRule": {
            "enabled": True,
            "objectives": {
                "timeToFirstToken": {"seconds": 1, "percent": 99.5},
                "interTokenLatency": {"seconds": 0.05, "percent": 95},
            },
        },
    },
    "closed in": {
        "operator": {"networkPolicy": {"enabled": True, "apiServer": [{"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}]}},
        "engine": {"networkPolicy": {"dnsPorts": [53, 5353]}},
        "monitoring": {"prometheus": []},
        "egress": {"httpsProxy": "http://10.0.0.2:3128", "caBundle": {"configMapName": "authorities"}},
    },
    "mirrored": {
        "imageRegistry": "registry.example:5000/mirror",
        "engine": {"image": f"engine@sha256:{'0' * 64}", "imagePullSecrets": ["registry"]},
        "operator": {"imagePullSecrets": ["registry"], "imagePullPolicy": "Always"},
    },
    "extended": {
        "operator": {
            "extraArgs": ["--request-seconds=60"],
            "extraEnv": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
            "extraVolumes": [{"name": "more", "configMap": {"name": "more", "optional": True}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more", "readOnly": True}],
            "podSecurityContext": {"fsGroupChangePolicy": "OnRootMismatch", "supplementalGroups": [7]},
            "securityContext": {"runAsUser": 1000},
            "podLabels": {"team": "search"},
            "podAnnotations": {"note": "yes"},
            "resources": {"limits": {"cpu": 1}},
        },
        "serviceAccount": {"name": "mine", "annotations": {"role": "none"}},
    },
    "with a gateway": {
        "gateway": {
            "enabled": True,
            "replicas": 2,
            "imagePullPolicy": "Always",
            "imagePullSecrets": ["registry"],
            "priorityClassName": "system-cluster-critical",
            "affinity": {"nodeAffinity": {}},
            "tolerations": [{"key": "system", "operator": "Exists", "effect": "NoSchedule"}],
            "podLabels": {"team": "search"},
            "podAnnotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": "tmp,more"},
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "podMonitor": {"enabled": True},
            "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"note": "yes"}},
            "networkPolicy": {
                "allowFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
                "allowPoolsFrom": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
            },
        },
    },
    "with a gateway for one namespace": {"watchNamespaces": ["one"], "gateway": {"enabled": True}},
    "with a gateway that identifies clients": {
        "gateway": {
            "enabled": True,
            "listenAddress": "0.0.0.0",
            "tlsSecretName": "certificate",
            "apiKeys": {
                "secretName": "clients",
                "engineSecretName": "engines",
                "defaults": {"tokensPerMinute": 100_000},
                "clients": {"team-a": {"concurrentRequests": 8, "priority": -1, "namespaces": ["team-a"]}},
            },
            "service": {"port": 443},
        },
    },
    "for other tenants": {
        "podTemplate": "any",
        "headroom": {"priorityClassName": "placeholders"},
        "operator": {"networkPolicy": {"enabled": False}},
        "admissionPolicy": {
            "reservedNamespaces": ["kube-system", "argocd"],
            "engineImages": ["registry.example/fastgen/"],
            "modelImages": ["registry.example/models/"],
            "podLabels": ["example.com/"],
            "podAnnotations": [],
        },
    },
    "by the platform": {
        "podSecurity": {"fixedUser": False},
        "rbac": {"create": False, "aggregateToDefaultRoles": False},
        "serviceAccount": {"create": False, "name": "theirs"},
        "admissionPolicy": {"enabled": False},
        "dashboards": {"enabled": False},
        "headroom": {"enabled": False},
        "engine": {name: {"enabled": False} for name in ("networkPolicy", "podMonitor", "inferencePool")},
    },
}


@pytest.fixture(scope="module")
def plane(helm: Helm) -> Iterator[ControlPlane]:
    with ControlPlane(helm.program.parent) as started:
        spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in ("one", "two")]
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        spaces.append({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM, "labels": labels}})
        of_others = (POD_MONITOR_CRD, PROMETHEUS_RULE_CRD, SERVICE_MONITOR_CRD, HTTP_ROUTE_CRD, SCALED_OBJECT_CRD)
        crds = [definition.fetch() for definition in of_others]
        apply(started, *spaces, *crds)
        started.wait_for_crds(*(crd["metadata"]["name"] for crd in crds))
        started.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", SYSTEM, "--timeout=150s")
        yield started


def apply(plane: ControlPlane, *objects: Object, dry_run: bool = False) -> str:
    """Apply objects by server-side apply. A field that the API server does not know is an error."""
    mode = ("--dry-run=server",) if dry_run else ()
    return plane.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--validate=strict", *mode, "--filename", "-"),
        stdin="---\n".join(json.dumps(obj) + "\n" for obj in objects),
    )


def pods(rendered: list[Object]) -> Iterator[Object]:
    """Yield a pod of the Deployment, which itself is accepted whatever its pods may do, and the test's pod."""
    for obj in rendered:
        if obj["kind"] in ("Deployment", "Pod"):
            pod = obj["spec"]["template"] if obj["kind"] == "Deployment" else obj
            metadata = {**pod["metadata"], "name": "first", "namespace": obj["metadata"]["namespace"]}
            # Nothing is created, also no ServiceAccount.
            spec = {**pod["spec"], "serviceAccountName": "default"}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def uninstall(plane: ControlPlane, helm: Helm, release: str) -> None:
    helm.run("uninstall", release, "--namespace", SYSTEM, f"--kubeconfig={plane.kubeconfig}")


def install(plane: ControlPlane, helm: Helm, release: str, *args: str) -> None:
    where = ("--namespace", SYSTEM, f"--kubeconfig={plane.kubeconfig}")
    helm.run("install", release, str(CHART), *where, *args)


def test_the_api_server_accepts_every_rendering_and_its_pods(plane: ControlPlane, helm: Helm) -> None:
    objects: dict[str, Object] = {}
    for values in MATRIX.values():
        rendered = helm.render_with_tests(*arguments(values))
        checked = [obj for obj in rendered if obj["kind"] != "Pod"] + list(pods(rendered))
        objects |= {json.dumps(obj, sort_keys=True): obj for obj in checked}
    output = apply(plane, *objects.values(), dry_run=True)
    assert output.count("(server dry run)") == len(objects)


def arguments(values: dict[str, Any]) -> list[str]:
    """Return helm's arguments for values."""
    return [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]


def test_the_matrix_sets_every_value() -> None:
    """A value that no rendering changes is named here with its reason."""
    everything = yaml.safe_load((CHART / "values.yaml").read_text())
    changed = {path for values in MATRIX.values() for path in paths(values, everything)}
    unchanged = {path for path in paths(everything, everything) if not any(path.startswith(done) for done in changed)}
    plain_arguments = {"logFormat", "verbose", "resyncSeconds", "relistSeconds", "scrapeSeconds", "workers", "image"}
    assert unchanged == {
        *(f"operator.{name}" for name in plain_arguments),
        # tests/chart/test_gateway_values.py sets them.
        *(f"gateway.{name}" for name in GATEWAY_ARGUMENTS),
        *("operator.podDisruptionBudget.enabled", "dashboards.labels.grafana_dashboard"),
        *("egress.httpProxy", "egress.noProxy", "egress.caBundle.key"),
        *("engine.networkPolicy.dns", "engine.networkPolicy.modelSources"),
        *("operator.resources.requests.cpu", "operator.resources.requests.memory", "operator.resources.limits.memory"),
    }


def paths(values: dict[str, Any], everything: dict[str, Any], at: str = "") -> Iterator[str]:
    for name, value in values.items():
        known = everything.get(name)
        if isinstance(value, dict) and isinstance(known, dict) and value and known:
            yield from paths(value, known, f"{at}{name}.")
        else:
            yield f"{at}{name}"


def test_install_yaml_is_accepted_as_one_file(plane: ControlPlane) -> None:
    objects = load_all((ROOT / "install.yaml").read_text())
    assert objects[0]["kind"] == "Namespace"
    assert [obj["kind"] for obj in objects].count("CustomResourceDefinition") == 1
    namespaces = {obj["metadata"].get("namespace", SYSTEM) for obj in objects}
    assert namespaces == {SYSTEM}
    output = apply(plane, *objects, dry_run=True)
    assert output.count("(server dry run)") == len(objects)


def test_objects_of_other_kinds_in_the_documentation_are_accepted(plane: ControlPlane) -> None:
    """tests/operator/api/test_crd.py applies the FastGenDeployments."""
    found = [made for _, made in documents() if "apiVersion" in made and made["kind"] != "FastGenDeployment"]
    assert {made["kind"] for made in found} >= {"HTTPRoute", "Job", "ScaledObject"}
    output = apply(
        plane, *({**made, "metadata": {**made["metadata"], "namespace": "one"}} for made in found), dry_run=True
    )
    assert output.count("(server dry run)") == len(found)


def test_the_crd_and_its_resources_outlive_a_release_and_join_the_next(plane: ControlPlane, helm: Helm) -> None:
    def owner() -> str:
        crd = json.loads(plane.kubectl("get", CRD, "--output=json"))
        name: str = crd["metadata"]["annotations"].get("meta.helm.sh/release-name", "")
        return name

    install(plane, helm, "first")
    plane.wait_for_crds(CRD.removeprefix("crd/"))
    apply(plane, {**resource(), "metadata": {"name": "chat", "namespace": "one"}})
    uid = plane.kubectl("get", "fgd/chat", "--namespace=one", "--output=jsonpath={.metadata.uid}")
    uninstall(plane, helm, "first")
    # Without the flag that the manual names, helm refuses.
    with pytest.raises(CommandError, match=re.escape('must equal "second": current value is "first"')):
        install(plane, helm, "second")
    install(plane, helm, "second", "--take-ownership")
    assert owner() == "second"
    uninstall(plane, helm, "second")
    # The chart of nothing but the CRD takes it over in the same way.
    helm.run(
        *("install", "crds", str(CRD_CHART), "--namespace", SYSTEM, "--take-ownership"),
        f"--kubeconfig={plane.kubeconfig}",
    )
    assert owner() == "crds"
    uninstall(plane, helm, "crds")
    assert plane.kubectl("get", "fgd/chat", "--namespace=one", "--output=jsonpath={.metadata.uid}") == uid


def test_the_commands_of_the_upgrade_page_succeed(plane: ControlPlane, helm: Helm) -> None:
    """As they are printed, without those that wait for pods: there is no node."""
    page = [text for place, text in commands("helm") if place.startswith("docs/how-to/upgrade.md:")]
    verbs = [text.split()[1] for text in page]
    assert verbs == ["upgrade", "test", "rollback", "uninstall", "install"]
    install(plane, helm, "fastgen", "--take-ownership")
    try:
        for command in page:
            if not command.startswith("helm test"):
                words = command.replace(" --wait", "").replace(" NAME ", " other ").split()[1:]
                helm.run(
                    *(str(CHART) if word == "charts/fastgen" else word for word in words),
                    f"--kubeconfig={plane.kubeconfig}",
                )
    finally:
        helm.run("uninstall", "other", "--ignore-not-found", f"--kubeconfig={plane.kubeconfig}")


def test_the_clusters_roles_contain_rights_on_resources(plane: ControlPlane, helm: Helm) -> None:
    roles = [obj for obj in helm.render() if "rules" in obj and obj["metadata"]["name"].endswith(("-view", "-edit"))]
    people = ("view", "edit", "admin")
    apply(plane, *roles, *(binding(role) for role in people))
    asked = [("list", ""), ("create", ""), ("patch", "scale"), ("patch", "status")]

    def allowed() -> dict[str, list[bool]]:
        reviews = [review(user, verb, part) for user in people for verb, part in asked]
        words = ("create", "--output=jsonpath={.status.allowed} ", "--filename", "-")
        answers = iter(plane.kubectl(*words, stdin=dump_all(reviews)).split())
        return {user: [next(answers) == "true" for _ in asked] for user in people}

    writer = [True, True, True, False]
    expected = {"view": [True, False, False, False], "edit": writer, "admin": writer}
    # The controller-manager aggregates roles; the API server caches them.
    eventually(lambda: allowed() == expected, within=20, what="the aggregation of roles", every=0.3)


def binding(role: str) -> Object:
    """Return a RoleBinding of one of the cluster's own roles to a user of its name."""
    subject = {"kind": "User", "name": role, "apiGroup": "rbac.authorization.k8s.io"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    metadata = {"name": f"{role}-of-one", "namespace": "one"}
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
    return {**kind, "metadata": metadata, "roleRef": reference, "subjects": [subject]}


def review(user: str, verb: str, subresource: str) -> Object:
    """Return the question whether the user may do something with the FastGenDeployments of `one`."""
    attributes = {"group": "fastgen.dev", "resource": "fastgendeployments", "subresource": subresource}
    spec = {"user": user, "resourceAttributes": {**attributes, "verb": verb, "namespace": "one"}}
    return {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
