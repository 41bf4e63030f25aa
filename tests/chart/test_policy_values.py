"""Network and monitoring values reach the operator, and create its own NetworkPolicy and PodMonitor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.commands import CommandError
from fastgen_operator.children.network_policy import dns_egress
from fastgen_operator.children.platform import CLUSTER_DNS, DNS_PORTS, MODEL_SOURCES, PLAIN_PODS, PodSettings
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.objects.container import HTTP_PORT
from fastgen_operator.runtime.settings import Settings, parse_settings
from harness.chart import SYSTEM, Helm

MONITORING = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()


def settings(helm: Helm, *args: str) -> Settings:
    return parse_settings(container(helm, *args)["args"])


def container(helm: Helm, *args: str) -> dict[str, Any]:
    found: dict[str, Any] = helm.one("Deployment", *args)["spec"]["template"]["spec"]["containers"][0]
    return found


def test_engines_allow_exactly_the_operators_pods(helm: Helm) -> None:
    (peer,) = settings(helm).neighbours.operator
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": SYSTEM}}
    labels = helm.one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert peer["podSelector"] == {"matchLabels": helm.one("Deployment")["spec"]["selector"]["matchLabels"]}


def test_the_charts_default_peers_equal_the_operators(helm: Helm) -> None:
    neighbours = settings(helm).neighbours
    assert neighbours.dns == CLUSTER_DNS
    assert neighbours.dns_ports == DNS_PORTS
    assert neighbours.model_sources == MODEL_SOURCES


def test_placeholder_pods_have_a_class_of_the_chart_unless_disabled(helm: Helm) -> None:
    made = helm.one("PriorityClass")
    name = made["metadata"]["name"]
    assert (made["value"], made["preemptionPolicy"], made.get("globalDefault")) == (-10, "Never", None)
    assert settings(helm).platform.headroom_class == name
    given = ("--set", "headroom.priorityClassName=mine")
    assert settings(helm, *given).platform.headroom_class == "mine"
    off = ("--set", "headroom.enabled=false", *given)
    assert settings(helm, *off).platform.headroom_class == ""
    for args in (given, off):
        assert not [obj for obj in helm.render(*args) if obj["kind"] == "PriorityClass"]

    def allows(name: str, *args: str) -> bool:
        policies = [obj for obj in helm.render(*args) if obj["kind"] == "ValidatingAdmissionPolicy"]
        return any(f"== '{name}'" in each["expression"] for obj in policies for each in obj["spec"]["validations"])

    assert (allows(name), allows("mine"), allows("mine", *given), allows("mine", *off)) == (True, False, True, False)


def test_the_ports_of_the_dns_servers_reach_both_policies(helm: Helm) -> None:
    chosen = ("--set-json", "engine.networkPolicy.dnsPorts=[5353]", "--set", "operator.networkPolicy.enabled=true")
    expected = [{"port": 5353, "protocol": "UDP"}, {"port": 5353, "protocol": "TCP"}]
    assert dns_egress(settings(helm, *chosen).neighbours)["ports"] == expected
    assert helm.one("NetworkPolicy", *chosen)["spec"]["egress"][1]["ports"] == expected


def test_dispensable_children_are_created_unless_disabled(helm: Helm) -> None:
    assert settings(helm).without == ()
    off = ("--set", "engine.podMonitor.enabled=false", "--set", "engine.networkPolicy.enabled=false")
    assert set(settings(helm, *off).without) == {"PodMonitor", "NetworkPolicy"}
    assert settings(helm, "--set", "engine.inferencePool.enabled=false").without == ("InferencePool",)


def test_prometheus_peers_and_pod_monitor_labels_reach_the_operator(helm: Helm) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"team": "sre"}}}]
    chosen = settings(
        helm,
        *("--set-json", f"monitoring.prometheus={json.dumps(peers)}"),
        *("--set", "monitoring.podMonitorLabels.release=kube-prometheus-stack"),
    )
    assert chosen.neighbours.prometheus == tuple(peers)
    assert chosen.platform.pod_monitor_labels == (("release", "kube-prometheus-stack"),)


def test_proxy_and_authorities_reach_the_pods_of_the_operator(helm: Helm) -> None:
    assert settings(helm).pods == PLAIN_PODS
    chosen = settings(
        helm,
        *("--set", "egress.httpsProxy=http://10.0.0.1:3128", "--set", "egress.caBundle.configMapName=authorities"),
        *("--set", "egress.caBundle.key=ca.pem", "--set-json", 'egress.noProxy=".svc,10.0.0.0/8"'),
    )
    plain = settings(helm, "--set", "egress.httpProxy=http://proxy:3128").pods
    assert (plain.http_proxy, plain.https_proxy) == ("http://proxy:3128", "")
    assert chosen.platform.pods == PodSettings(
        https_proxy="http://10.0.0.1:3128", no_proxy=".svc,10.0.0.0/8", ca_config_map="authorities", ca_key="ca.pem"
    )


def test_the_cluster_can_assign_user_ids(helm: Helm) -> None:
    off = ("--set", "podSecurity.fixedUser=false")
    assert settings(helm, *off).pods == PodSettings(fixed_user=False)
    for args, expected in (((), PLAIN_PODS), (off, PodSettings(fixed_user=False))):
        (tested,) = [obj["spec"] for obj in helm.tests(*args) if obj["kind"] == "Pod"]
        for pod in (helm.one("Deployment", *args)["spec"]["template"]["spec"], tested):
            # The chart's own pods have no volume of which the owner would change.
            assert {**pod["securityContext"], "fsGroupChangePolicy": "OnRootMismatch"} == expected.security_context


def test_the_operator_has_a_network_policy_and_can_have_a_pod_monitor(helm: Helm) -> None:
    assert {obj["kind"] for obj in helm.render()} & {"PodMonitor", "NetworkPolicy"} == {"NetworkPolicy"}
    off = ("--set", "operator.networkPolicy.enabled=false")
    assert "NetworkPolicy" not in {obj["kind"] for obj in helm.render(*off)}
    enabled = ("--set", "operator.podMonitor.enabled=true")
    selector = helm.one("Deployment")["spec"]["selector"]["matchLabels"]
    monitor = helm.one("PodMonitor", *enabled, "--set", "monitoring.podMonitorLabels.release=mine")
    assert monitor["metadata"]["labels"]["release"] == "mine"
    assert monitor["spec"]["selector"]["matchLabels"] == selector
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container(helm)["ports"]}
    assert endpoint["path"] == "/metrics"
    assert endpoint["honorLabels"] is True, "namespace and name are those of the FastGenDeployment"
    policy = helm.one("NetworkPolicy", *enabled)["spec"]
    assert (policy["podSelector"]["matchLabels"], policy["policyTypes"]) == (selector, ["Ingress", "Egress"])
    (ingress,) = policy["ingress"]
    assert ingress["from"] == list(settings(helm, *enabled).neighbours.prometheus)
    assert [port["port"] for port in ingress["ports"]] == ["metrics"]
    nobody = helm.one("NetworkPolicy", *enabled, "--set-json", "monitoring.prometheus=[]")["spec"]
    assert "Ingress" in nobody["policyTypes"]
    assert "ingress" not in nobody, "without a Prometheus nothing connects to the operator"


def test_a_service_monitor_replaces_the_pod_monitor(helm: Helm) -> None:
    enabled = ("--set", "operator.serviceMonitor.enabled=true", "--set", "monitoring.podMonitorLabels.release=mine")
    assert not {obj["kind"] for obj in helm.render()} & {"ServiceMonitor", "Service"}
    by_kind = {obj["kind"]: obj for obj in helm.render(*enabled)}
    assert "PodMonitor" not in by_kind
    service, monitor = by_kind["Service"], by_kind["ServiceMonitor"]
    assert service["spec"]["selector"] == by_kind["Deployment"]["spec"]["selector"]["matchLabels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "mine"
    (endpoint,), (port,) = monitor["spec"]["endpoints"], service["spec"]["ports"]
    assert (endpoint["port"], endpoint["path"], endpoint["honorLabels"]) == (port["name"], "/metrics", True)
    assert service["spec"]["clusterIP"] == "None"
    assert port["targetPort"] in {each["name"] for each in container(helm)["ports"]}
    with pytest.raises(CommandError, match="enable only one of them"):
        helm.render(*enabled, "--set", "operator.podMonitor.enabled=true")


def test_the_operator_may_connect_to_the_api_server_dns_and_engines_only(helm: Helm) -> None:
    rules = helm.one(
        *("NetworkPolicy", "--set", "operator.networkPolicy.enabled=true"),
        *("--set-json", 'operator.networkPolicy.apiServer=[{"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}]'),
    )["spec"]["egress"]
    (usual,) = helm.one("NetworkPolicy")["spec"]["egress"][:1]
    assert {port["port"] for port in usual["ports"]} == {443, 6443, 8443, 16443}, "not the operator's own ports"
    api_server, dns, engines = rules
    assert api_server == {"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}
    assert dns["to"] == list(CLUSTER_DNS)
    assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    ((peer,), (port,)) = engines["to"], engines["ports"]
    assert peer["namespaceSelector"] == {}
    (expression,) = peer["podSelector"]["matchExpressions"]
    assert (expression["key"], expression["operator"]) == (OWNER_LABEL, "Exists")
    assert port == {"port": HTTP_PORT, "protocol": "TCP"}


def test_the_alerts_are_those_of_the_page(helm: Helm) -> None:
    assert not [obj for obj in helm.render() if obj["kind"] == "PrometheusRule"]
    on = ("--set", "prometheusRule.enabled=true", "--set", "prometheusRule.labels.release=mine")
    rule = helm.one("PrometheusRule", *on)
    assert rule["metadata"]["labels"]["release"] == "mine"
    rules = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    alerts = dict.fromkeys(each["alert"] for each in rules if "alert" in each)
    assert re.findall(r"^\| (FastGen\w+) \|", MONITORING, re.MULTILINE) == list(alerts)


def test_what_a_pod_template_may_contain_reaches_the_operator_and_the_policies(helm: Helm) -> None:
    assert settings(helm).pods.pod_template == "restricted"
    any_template = ("--set", "podTemplate=any")
    assert settings(helm, *any_template).pods.pod_template == "any"

    def restricted(*args: str) -> set[str]:
        """Return the policies that check the restricted standard without a condition on spec.podTemplate."""
        policies = [obj for obj in helm.render(*args) if obj["kind"] == "ValidatingAdmissionPolicy"]
        return {
            policy["metadata"]["name"].rpartition("-")[2]
            for policy in policies
            for rule in policy["spec"]["validations"]
            if "hostPID" in rule["expression"]
            and "has(params.spec.podTemplate)" not in rule["expression"]
            and "formerPod" in rule["expression"]
        }

    assert (restricted(), restricted(*any_template)) == ({"writes"}, set())


def test_what_can_be_switched_off_is_off(helm: Helm) -> None:
    off = ("operator.podDisruptionBudget", "dashboards", "admissionPolicy")
    args = [word for name in off for word in ("--set", f"{name}.enabled=false")]
    kinds = {obj["kind"] for obj in helm.render("--set", "operator.replicas=2", *args)}
    assert not kinds & {"PodDisruptionBudget", "ConfigMap", "ValidatingAdmissionPolicy"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("engine.networkPolicy.dns=null", "/engine/networkPolicy"),
        ("engine.networkPolicy.dns={}", "/engine/networkPolicy/dns"),
        ("engine.networkPolicy.dns[0].podSelektor=x", "additional properties 'podSelektor' not allowed"),
        ("engine.networkPolicy.modelSources[0].port=443", "additional properties 'port' not allowed"),
        ("engine.podMonitor.enabled=perhaps", "/engine/podMonitor/enabled"),
        ("monitoring.prometheus={monitoring}", "/monitoring/prometheus/0"),
        ("egress.httpProxy=proxy:3128", "/egress/httpProxy"),
        ("egress.caBundle.key=", "/egress/caBundle/key"),
        ("podSecurity.fixedUser=65532", "/podSecurity/fixedUser"),
        ("operator.serviceMonitor.enabled=yes", "/operator/serviceMonitor/enabled"),
        ("prometheusRule.objectives.timeToFirstToken.seconds=3", "/prometheusRule/objectives/timeToFirstToken/seconds"),
        ("prometheusRule.objectives.interTokenLatency.percent=90", "/prometheusRule/objectives/interTokenLatency"),
        ("prometheusRule.objectives.interTokenLatency.percent=100", "/prometheusRule/objectives/interTokenLatency"),
        ("podTemplate=baseline", "/podTemplate"),
        ("admissionPolicy.engineImages={it's}", "/admissionPolicy/engineImages/0"),
        ("admissionPolicy.modelImages={it's}", "/admissionPolicy/modelImages/0"),
        ("admissionPolicy.podLabels=team", "/admissionPolicy/podLabels"),
        ("dashboards.label=x", "additional properties 'label' not allowed"),
    ],
)
def test_invalid_values_are_rejected_by_name(helm: Helm, value: str, words: str) -> None:
    with pytest.raises(CommandError) as refused:
        helm.render("--set", value)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--neighbours", "{"), "--neighbours: not JSON"),
        (
            ("--neighbours", "[]"),
            "--neighbours: give an object with lists named operator, gateway, prometheus, dns, dnsPorts, modelSources",
        ),
        (("--neighbours", '{"grafana": []}'), "--neighbours: give an object with lists named"),
        (("--neighbours", '{"dns": {}}'), "--neighbours: dns: give a list of objects"),
        (("--neighbours", '{"dnsPorts": ["53"]}'), "--neighbours: dnsPorts: give a list of port numbers"),
        (("--pod-monitor-label", "release"), "--pod-monitor-label: release: give KEY=VALUE"),
        (("--http-proxy", "proxy:3128"), "--http-proxy: proxy:3128: give a URL such as http://proxy.example:3128"),
        (("--https-proxy", "http://proxy:x"), "--https-proxy: http://proxy:x: give a URL"),
        (("--without", "Deployment"), "--without: invalid choice: 'Deployment'"),
    ],
)
def test_an_invalid_flag_is_rejected_by_name(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(["--engine-image", "e", *words])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
