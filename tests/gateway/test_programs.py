"""The picker's command line and HTTP server, and Envoy's bootstrap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.controlplane import free_ports
from fastgen_gateway.bootstrap import BOOTSTRAP, Ports, bootstrap
from fastgen_gateway.ext_proc import server
from fastgen_gateway.pool_certificate import write_certificate
from fastgen_gateway.settings import parse_settings
from gateway.gateway_pod import CLIENT_SECONDS, ENVOY, GatewayPod, expose
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import PATIENCE, wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]


@pytest.mark.parametrize("changed", [False, True], ids=["as it is", "with other ports"])
def test_envoy_accepts_the_bootstrap(tmp_path: Path, changed: bool) -> None:
    ports = Ports(*free_ports(6)) if changed else Ports()
    write_certificate(tmp_path)
    (tmp_path / "envoy.yaml").write_text(bootstrap(ports, pools=tmp_path))
    command = [ENVOY, "--mode", "validate", "-c", tmp_path / "envoy.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("OK") or done.stderr.rstrip().endswith("OK")


def test_other_ports_replace_those_of_the_bootstrap() -> None:
    assert bootstrap(Ports()) == BOOTSTRAP.read_text()
    other = yaml.safe_load(bootstrap(Ports(1, 2, 3, 4, 5, 6), "::1", Path("/certificate")))
    listeners = {each["name"]: each["address"]["socket_address"] for each in other["static_resources"]["listeners"]}
    assert listeners["front"] == {"address": "::1", "port_value": 1}
    assert listeners["again"] == {"address": "127.0.0.1", "port_value": 2}
    assert listeners["status"] == {"address": "::1", "port_value": 4}
    assert listeners["pools"] == {"address": "::1", "port_value": 6}
    assert other["admin"]["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 3}


def test_the_picker_accepts_each_body_that_envoy_buffers() -> None:
    found = yaml.safe_load(BOOTSTRAP.read_text())
    buffers = {
        each["per_connection_buffer_limit_bytes"]
        for each in found["static_resources"]["listeners"]
        if each["name"] != "status"
    }
    assert buffers == {17 << 20}
    assert dict(server._OPTIONS)["grpc.max_receive_message_length"] > 17 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "outside a pod, set --api-server"),
        (("--api-server", "http://x", "--hold-seconds", "0"), "--hold-seconds 0: set it to more than 0 and at most"),
        (("--api-server", "http://x", "--hold-seconds", "4000"), "--hold-seconds 4000: set it to more than 0"),
        (("--api-server", "http://x", "--body-seconds", "0"), "--body-seconds 0: set it to more than 0"),
        (("--api-server", "http://x", "--body-seconds", "nan"), "--body-seconds nan: set it to more than 0"),
        (("--api-server", "http://x", "--max-held-requests", "-1"), "--max-held-requests -1: set it to 0 or more"),
    ],
)
def test_bad_settings_end_the_program_with_the_remedy(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SystemExit) as ended:
        parse_settings(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_in_a_pod_the_kubelets_files_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = parse_settings(()).api_server
    assert found.url == "https://[fd00::1]:443"
    assert str(found.token_file) == "/var/run/secrets/kubernetes.io/serviceaccount/token"


def test_a_port_that_is_taken_ends_the_program(pod: GatewayPod, api: ApiServerStandIn) -> None:
    for flag, port in (("--http-port", pod.http_port), ("--picker-port", pod.ports.picker)):
        other = "--picker-port" if flag == "--http-port" else "--http-port"
        command = [
            *(sys.executable, "-m", "fastgen_gateway.main", "--api-server", api.url, flag, str(port)),
            *(other, str(free_ports(1)[0]), "--http-address", "127.0.0.1"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE * 60, check=False)
        assert done.returncode == 2, done.stderr
        assert str(port) in done.stderr
        assert "Traceback" not in done.stderr, done.stderr


def test_the_picker_is_ready_only_after_the_first_lists(api: ApiServerStandIn, tmp_path: Path) -> None:
    api.status = 500
    started = GatewayPod(tmp_path, api.url)
    started.start_picker()
    try:
        wait_until(lambda: started.status(started.http_port, "/healthz") == 200, "it listens", 60)
        assert started.status(started.http_port, "/readyz") == 503
        api.status = 200
        wait_until(lambda: started.status(started.http_port, "/readyz") == 200, "it has read the lists", 60)
    finally:
        started.stop()


def test_the_metrics_are_those_of_prometheus(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "m", *replicas)
    replicas[0].mode = "draining"
    for _ in range(4):
        pod.ask("m")
    pod.ask("none")
    wait_until(lambda: 'requests_running{name="m",namespace="default"} 0.0' in pod.metrics(), "all ended")
    wait_until(lambda: 'scrape_failures_total{name="m"' in pod.metrics(), "scrapes of the stand-ins fail")
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(pod.metrics())
        for sample in family.samples
    }
    assert values["fastgen_gateway_requests_total", "default", "m", "routed"] >= 4
    assert values["fastgen_gateway_requests_total", "", "", "model_not_found"] >= 1
    assert values["fastgen_gateway_retries_total", "default", "m"] >= 1
    assert values["fastgen_gateway_ready_replicas", "default", "m"] == 2
    assert values["fastgen_gateway_held_requests", "default", "m"] == 0


def test_envoys_state_is_on_its_port_and_its_admin_interface_is_not(pod: GatewayPod) -> None:
    url = f"http://127.0.0.1:{pod.ports.status}"
    assert pod.fetch(pod.ports.status, "/ready").text == "LIVE\n"
    assert "envoy_http_downstream_rq_active" in pod.envoy_metrics()
    for path in ("/", "/config_dump", "/quitquitquit", "/healthcheck/fail", "/ready/../config_dump"):
        assert httpx.post(f"{url}{path}", timeout=CLIENT_SECONDS).status_code in (404, 405), path
