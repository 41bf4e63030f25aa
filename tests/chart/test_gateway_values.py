"""The chart's gateway: what it creates, what it may read and reach, and that nothing of it exists by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.commands import CommandError
from fastgen_gateway.bootstrap import (
    BOOTSTRAP,
    CERTIFICATE,
    CERTIFICATE_FOLDER,
    CERTIFICATE_PATH,
    POOLS_FOLDER,
    Ports,
    with_pools,
    with_tls,
)
from fastgen_gateway.client_files import ClientPaths, read_clients
from fastgen_gateway.cluster.objects import ENDPOINT_SLICE
from fastgen_gateway.routing.client import Client
from fastgen_gateway.settings import parse_settings as parse_gateway_settings
from fastgen_operator.autoscale.scrape.gateways import GATEWAY_PORT
from fastgen_operator.kinds import FASTGEN, POD
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.objects.container import HTTP_PORT
from fastgen_operator.runtime.discovery import GATEWAY_SELECTOR
from fastgen_operator.runtime.settings import Settings, parse_settings
from harness.chart import SYSTEM, Helm
from support.namespace import Object

ON = ("--set", "gateway.enabled=true")
READS = {(kind.group, kind.plural, verb) for kind in (FASTGEN, ENDPOINT_SLICE) for verb in ("list", "watch")}


def rendered(helm: Helm, *args: str, release: str = "fastgen") -> dict[str, Object]:
    """Return the objects of the gateway by kind."""
    name, label = GATEWAY_SELECTOR.split("=")
    objects = helm.render(*ON, *args, release=release)
    found = [obj for obj in objects if obj["metadata"].get("labels", {}).get(name) == label]
    return {obj["kind"]: obj for obj in found}


def operator_settings(helm: Helm, *args: str) -> Settings:
    (deployment,) = [
        obj
        for obj in helm.render(*args)
        if obj["kind"] == "Deployment" and obj["metadata"]["name"].endswith("operator")
    ]
    return parse_settings(deployment["spec"]["template"]["spec"]["containers"][0]["args"])


def rights(role: Object) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def pod(helm: Helm, *args: str) -> Any:
    return rendered(helm, *args)["Deployment"]["spec"]["template"]["spec"]


def test_there_is_no_gateway_by_default(helm: Helm) -> None:
    assert "gateway" not in json.dumps([obj["metadata"] for obj in helm.render()])
    settings = operator_settings(helm)
    assert (settings.gateway_namespace, settings.neighbours.gateway) == (None, ())


def test_the_operator_finds_the_gateway_and_admits_it_to_the_engines(helm: Helm) -> None:
    settings = operator_settings(helm, *ON)
    assert settings.gateway_namespace == SYSTEM
    labels = rendered(helm)["Deployment"]["spec"]["template"]["metadata"]["labels"]
    name, label = GATEWAY_SELECTOR.split("=")
    assert labels[name] == label
    (peer,) = settings.neighbours.gateway
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": SYSTEM}}
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_gateway_may_only_read_what_its_code_reads(helm: Helm) -> None:
    """Whoever takes a gateway pod over has these rights, and no others."""
    made = rendered(helm)
    assert rights(made["ClusterRole"]) == READS
    assert made["ClusterRoleBinding"]["subjects"] == [
        {"kind": "ServiceAccount", "name": made["ServiceAccount"]["metadata"]["name"], "namespace": SYSTEM}
    ]
    bound = [
        obj["roleRef"]["name"]
        for obj in helm.render(*ON)
        if any(subject["name"] == made["ServiceAccount"]["metadata"]["name"] for subject in obj.get("subjects", ()))
    ]
    assert bound == [made["ClusterRole"]["metadata"]["name"]]


def test_in_watched_namespaces_it_has_a_role_in_each_and_the_operator_one_to_find_its_pods(helm: Helm) -> None:
    watched = ("--set", "watchNamespaces={one,two}")
    objects = helm.render(*ON, *watched)
    roles = {(obj["metadata"]["namespace"], obj["metadata"]["name"]): obj for obj in objects if obj["kind"] == "Role"}
    assert not [obj for obj in objects if obj["kind"].startswith("ClusterRole")]
    gateways = {place: role for (place, name), role in roles.items() if name == f"{SYSTEM}.fastgen-gateway"}
    assert {place: rights(role) for place, role in gateways.items()} == {"one": READS, "two": READS}
    assert rights(roles[SYSTEM, "fastgen-operator-gateway"]) == {(POD.group, POD.plural, "list")}
    (deployment,) = [
        obj for obj in objects if obj["metadata"]["name"] == "fastgen-gateway" and "replicas" in obj.get("spec", {})
    ]
    args = deployment["spec"]["template"]["spec"]["initContainers"][0]["args"]
    assert [arg for arg in args if arg.startswith("--namespace")] == ["--namespace=one", "--namespace=two"]


def test_the_picker_accepts_its_command_line(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (picker,) = pod(helm, "--set", "gateway.holdSeconds=77", "--set", "gateway.maxHeldRequests=7")["initContainers"]
    settings = parse_gateway_settings(picker["args"])
    assert (settings.limits.seconds, settings.limits.requests) == (77, 7)
    assert settings.http_port == GATEWAY_PORT == picker["ports"][0]["containerPort"]


@pytest.mark.parametrize("tls", ["", "certificate"])
@pytest.mark.parametrize("address", ["::", "0.0.0.0"])
def test_envoy_listens_on_the_address_of_the_chart(helm: Helm, address: str, tls: str) -> None:
    objects = helm.render(*ON, "--set", f"gateway.listenAddress={address}", "--set", f"gateway.tlsSecretName={tls}")
    (config,) = [obj["data"] for obj in objects if "envoy.yaml" in obj.get("data", {})]
    listeners = yaml.safe_load(config["envoy.yaml"])["static_resources"]["listeners"]
    found = {each["name"]: each["address"]["socket_address"] for each in listeners}
    # Envoy accepts the option with :: only.
    wanted = {"address": address} | ({"ipv4_compat": True} if address == "::" else {})
    assert found["front"] == {**wanted, "port_value": 8080}
    assert found["status"] == {**wanted, "port_value": 9902}
    assert found["again"]["address"] == "127.0.0.1"
    assert found["pools"] == {**wanted, "port_value": 9004}


def test_only_the_picker_has_the_keys_of_clients_and_engines(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    given = {"tokensPerMinute": 100, "concurrentRequests": 2, "priority": -1, "namespaces": ["a"]}
    keys = {
        "secretName": "clients",
        "engineSecretName": "engines",
        "defaults": {"priority": 3},
        "clients": {"team-a": given},
    }
    objects = helm.render(*ON, "--set-json", f"gateway.apiKeys={json.dumps(keys)}")
    made = {(obj["kind"], obj["metadata"]["name"]): obj for obj in objects}
    spec = made["Deployment", "fastgen-gateway"]["spec"]["template"]["spec"]
    (picker,), (envoy,) = spec["initContainers"], spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["client-keys"]["secret"]["secretName"] == "clients"
    assert volumes["engine-keys"]["secret"]["secretName"] == "engines"
    assert {mount["name"] for mount in envoy["volumeMounts"]} == {"tmp", "config", "pools"}
    places = {mount["name"]: mount["mountPath"] for mount in picker["volumeMounts"]}
    paths = parse_gateway_settings(picker["args"]).clients
    assert paths is not None
    assert paths.limits is not None
    assert (str(paths.keys), str(paths.engine_keys)) == (places["client-keys"], places["engine-keys"])
    assert str(paths.limits.parent) == places["client-limits"]

    config = made["ConfigMap", volumes["client-limits"]["configMap"]["name"]]["data"]
    (tmp_path / "keys").mkdir()
    for name in ("team-a", "team-b"):
        (tmp_path / "keys" / name).write_text(f"key of {name}")
    (tmp_path / "limits.json").write_text(config[paths.limits.name])
    assert read_clients(ClientPaths(tmp_path / "keys", tmp_path / "limits.json")).table.clients == {
        "team-a": Client("team-a", 100, 2, -1, frozenset({"a"})),
        "team-b": Client("team-b", priority=3),
    }


def test_engines_keys_without_keys_of_clients_are_refused(helm: Helm) -> None:
    with pytest.raises(CommandError, match=r"set gateway\.apiKeys\.secretName, too"):
        helm.render(*ON, "--set", "gateway.apiKeys.engineSecretName=engines")


def test_only_the_picker_has_the_token_and_both_containers_are_restricted(helm: Helm) -> None:
    made = pod(helm)
    assert made["automountServiceAccountToken"] is False
    (picker,), (envoy,) = made["initContainers"], made["containers"]
    assert picker["restartPolicy"] == "Always", "it would end before Envoy"
    mounts = {each["name"]: {mount["name"] for mount in each["volumeMounts"]} for each in (picker, envoy)}
    assert mounts == {"picker": {"tmp", "token", "pools"}, "envoy": {"tmp", "config", "pools"}}
    assert made["securityContext"]["runAsNonRoot"] is True
    for container in (picker, envoy):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert container["resources"]["limits"]["memory"]


def test_envoy_has_the_gateways_configuration_and_starts_again_when_it_changes(helm: Helm) -> None:
    made = rendered(helm)
    given = yaml.safe_load(made["ConfigMap"]["data"]["envoy.yaml"])
    assert given == yaml.safe_load(with_pools(BOOTSTRAP.read_text()))
    assert "checksum/envoy" in made["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    ports = {port["name"]: port["containerPort"] for port in pod(helm)["containers"][0]["ports"]}
    assert ports == {"http": Ports().front, "envoy-status": Ports().status, "pools": Ports().pools}


def test_with_a_certificate_envoy_speaks_tls(helm: Helm) -> None:
    made = rendered(helm, "--set", "gateway.tlsSecretName=certificate", "--set", "gateway.service.port=443")
    data, spec = made["ConfigMap"]["data"], made["Deployment"]["spec"]["template"]["spec"]
    text = with_tls(with_pools(BOOTSTRAP.read_text()))
    assert data == {"envoy.yaml": text, "certificate.yaml": CERTIFICATE.read_text()}
    (picker,), (envoy,) = spec["initContainers"], spec["containers"]
    places = {mount["name"]: mount["mountPath"] for mount in envoy["volumeMounts"]}
    assert places["certificate"] == CERTIFICATE_FOLDER
    assert f"{places['config']}/certificate.yaml" == CERTIFICATE_PATH
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["certificate"]["secret"]["secretName"] == "certificate"
    assert "certificate" not in {mount["name"] for mount in picker["volumeMounts"]}
    assert made["Service"]["spec"]["ports"] == [{"name": "https", "port": 443, "targetPort": "http"}]
    plain = rendered(helm)["Deployment"]["spec"]["template"]["metadata"]["annotations"]["checksum/envoy"]
    assert made["Deployment"]["spec"]["template"]["metadata"]["annotations"]["checksum/envoy"] != plain


def test_a_pod_drains_before_envoy_ends(helm: Helm) -> None:
    made = pod(helm, "--set", "gateway.drainSeconds=120")
    (picker,), (envoy,) = made["initContainers"], made["containers"]
    assert envoy["lifecycle"]["preStop"]["httpGet"] == {"path": "/drain", "port": GATEWAY_PORT}
    assert "lifecycle" not in picker, "a sidecar ends after the others"
    assert made["terminationGracePeriodSeconds"] == 120


def test_its_policy_admits_clients_the_operator_and_prometheus_each_to_its_port(helm: Helm) -> None:
    made = rendered(helm, "--set-json", 'gateway.networkPolicy.allowFrom=[{"ipBlock": {"cidr": "10.0.0.0/8"}}]')
    clients, pools, operator, prometheus = made["NetworkPolicy"]["spec"]["ingress"]
    assert pools == {"from": [{"namespaceSelector": {}}], "ports": [{"port": "pools", "protocol": "TCP"}]}
    assert clients == {"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": "http", "protocol": "TCP"}]}
    assert operator["ports"] == [{"port": "picker", "protocol": "TCP"}]
    assert operator["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "fastgen-operator"
    assert {port["port"] for port in prometheus["ports"]} == {"picker", "envoy-status"}
    api_server, engines = made["NetworkPolicy"]["spec"]["egress"]
    assert {port["port"] for port in api_server["ports"]} == {443, 6443, 8443, 16443}
    (expression,) = engines["to"][0]["podSelector"]["matchExpressions"]
    assert (expression["key"], expression["operator"]) == (OWNER_LABEL, "Exists")
    assert engines["ports"] == [{"port": HTTP_PORT, "protocol": "TCP"}]


def test_the_operator_may_connect_to_the_gateways_metrics(helm: Helm) -> None:
    (policy,) = [
        obj
        for obj in helm.render(*ON)
        if obj["kind"] == "NetworkPolicy" and obj["metadata"]["name"].endswith("operator")
    ]
    (rule,) = [rule for rule in policy["spec"]["egress"] if rule["ports"][0]["port"] == GATEWAY_PORT]
    labels = rendered(helm)["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert rule["to"][0]["podSelector"]["matchLabels"].items() <= labels.items()


def test_several_pods_have_a_disruption_budget_and_different_nodes(helm: Helm) -> None:
    assert "PodDisruptionBudget" not in rendered(helm)
    made = rendered(helm, "--set", "gateway.replicas=2", "--set", "gateway.podMonitor.enabled=true")
    selector = made["Deployment"]["spec"]["selector"]
    assert made["PodDisruptionBudget"]["spec"] == {"maxUnavailable": 1, "selector": selector}
    assert made["Service"]["spec"]["selector"] == selector["matchLabels"]
    assert made["PodMonitor"]["spec"]["selector"] == selector
    affinity = made["Deployment"]["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["labelSelector"] == selector


@pytest.mark.parametrize(
    ("release", "name"),
    [("fastgen", "fastgen-gateway"), ("prod", "prod-fastgen-gateway"), ("7", "fastgen-7-fastgen-gateway")],
)
def test_the_service_is_named_after_the_release(helm: Helm, release: str, name: str) -> None:
    service = rendered(helm, "--set", "gateway.service.port=8080", release=release)["Service"]
    assert service["metadata"]["name"] == name
    assert service["spec"]["ports"] == [{"name": "http", "port": 8080, "targetPort": "http"}]


def test_every_value_of_the_gateways_pods_is_rendered(helm: Helm) -> None:
    made = rendered(
        helm,
        *("--set", "gateway.image=one:1", "--set", "gateway.envoyImage=two:2", "--set", "imageRegistry=mirror.example"),
        *("--set", "gateway.imagePullPolicy=Always", "--set", "gateway.imagePullSecrets={registry}"),
        *("--set", "gateway.logFormat=text", "--set", "gateway.priorityClassName=high"),
        *("--set-json", 'gateway.nodeSelector={"disk": "fast"}'),
        *("--set-json", 'gateway.tolerations=[{"key": "a", "operator": "Exists"}]'),
        *("--set-json", 'gateway.affinity={"nodeAffinity": {}}'),
        *("--set-json", 'gateway.podLabels={"team": "search", "app.kubernetes.io/name": "other"}'),
        *("--set-json", 'gateway.podAnnotations={"note": "yes"}'),
        *("--set-json", 'gateway.resources={"limits": {"cpu": 1}}'),
        *("--set-json", 'gateway.envoyResources={"limits": {"cpu": 2}}'),
        *("--set-json", 'gateway.service={"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}}'),
    )
    template = made["Deployment"]["spec"]["template"]
    spec, metadata = template["spec"], template["metadata"]
    (picker,), (envoy,) = spec["initContainers"], spec["containers"]
    assert (picker["image"], envoy["image"]) == ("mirror.example/one:1", "two:2")
    assert {picker["imagePullPolicy"], envoy["imagePullPolicy"]} == {"Always"}
    assert (spec["imagePullSecrets"], spec["priorityClassName"]) == ([{"name": "registry"}], "high")
    assert "--log-format=text" in picker["args"]
    assert spec["nodeSelector"]["disk"] == "fast"
    assert spec["tolerations"] == [{"key": "a", "operator": "Exists"}]
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert metadata["labels"]["team"] == "search"
    assert metadata["labels"]["app.kubernetes.io/name"] == "fastgen-gateway", "the Service would not find it"
    assert metadata["annotations"]["note"] == "yes"
    assert (picker["resources"]["limits"]["cpu"], envoy["resources"]["limits"]["cpu"]) == (1, 2)
    assert (made["Service"]["spec"]["type"], made["Service"]["metadata"]["annotations"]) == ("LoadBalancer", {"a": "b"})


def test_roles_can_be_left_to_the_administrator(helm: Helm) -> None:
    off = ("--set", "rbac.create=false", "--set", "rbac.aggregateToDefaultRoles=false")
    for scope in ("[]", '["one"]'):
        kinds = {obj["kind"] for obj in helm.render(*ON, *off, "--set-json", f"watchNamespaces={scope}")}
        assert not kinds & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}, scope


def test_the_picker_makes_the_certificate_that_envoy_shows_to_gateways(
    helm: Helm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    spec = pod(helm)
    (picker,), (envoy,) = spec["initContainers"], spec["containers"]
    assert parse_gateway_settings(picker["args"]).pool_certificate == Path(POOLS_FOLDER)
    assert {"name": "pools", "mountPath": POOLS_FOLDER} in picker["volumeMounts"]
    assert {"name": "pools", "mountPath": POOLS_FOLDER, "readOnly": True} in envoy["volumeMounts"]
    assert {"name": "pools", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}} in spec["volumes"]


def test_without_inference_pools_nothing_serves_them(helm: Helm) -> None:
    made = rendered(helm, "--set", "engine.inferencePool.enabled=false")
    assert yaml.safe_load(made["ConfigMap"]["data"]["envoy.yaml"]) == yaml.safe_load(BOOTSTRAP.read_text())
    assert "pools" not in json.dumps([made["Deployment"], made["NetworkPolicy"]])


def test_only_gateways_of_the_values_may_ask_the_picker(helm: Helm) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
    made = rendered(helm, "--set-json", f"gateway.networkPolicy.allowPoolsFrom={json.dumps(peers)}")
    assert made["NetworkPolicy"]["spec"]["ingress"][1]["from"] == peers
    made = rendered(helm, "--set-json", "gateway.networkPolicy.allowPoolsFrom=[]")
    assert "pools" not in json.dumps(made["NetworkPolicy"])


def test_with_a_gateway_the_operator_may_write_what_leads_from_pools_to_it(helm: Helm) -> None:
    def operator(*args: str) -> set[tuple[str, str, str]]:
        (role,) = (
            each
            for each in helm.render(*args)
            if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", f"{SYSTEM}.fastgen-operator")
        )
        return rights(role)

    verbs = ("get", "list", "create", "patch", "delete")
    added = {(ENDPOINT_SLICE.group, ENDPOINT_SLICE.plural, verb) for verb in verbs}
    assert operator(*ON) - operator() == added
