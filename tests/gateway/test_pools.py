"""InferencePools: the real Envoy of a Gateway asks the picker, by the endpoint picker protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from envoy.service.accesslog.v3.als_pb2_grpc import AccessLogServiceStub
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from cluster.controlplane import free_ports
from fastgen_gateway.ext_proc.pool_messages import subset
from gateway.gateway_pod import CLIENT_SECONDS, GatewayPod, expose, wait_for_idle
from gateway.pool_gateway import PoolGateway
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]
# Three calls that have not ended.
_WAITING = 'envoy_http_downstream_rq_active{envoy_http_conn_manager_prefix="pools"} 3\n'


@pytest.fixture
def pool(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair, tmp_path: Path) -> Iterator[PoolGateway]:
    """A Gateway that sends requests to two replicas of model m, as the picker says."""
    expose(api, pod, "m", *replicas)
    # It must not balance by itself where the picker should say where.
    with PoolGateway(tmp_path, pod.ports.pools, [each.address for each in replicas], fails_open=False) as gateway:
        yield gateway


def ask_idle(pool: PoolGateway, pod: GatewayPod, **fields: object) -> str:
    """Send a request once no other is counted as running, and return the replica that has served it."""
    wait_for_idle(pod)
    response = pool.post({"model": "m", **fields})
    assert response.status_code == 200, response.text
    served_by: str = response.json()["served_by"]
    return served_by


def test_prompts_that_begin_alike_go_to_one_replica(pool: PoolGateway, pod: GatewayPod) -> None:
    texts = [letter * 2000 for letter in "xyz"]
    first = {text: ask_idle(pool, pod, prompt=text) for text in texts}
    assert set(first.values()) == {"a", "b"}
    for text in (*texts, *texts):
        assert ask_idle(pool, pod, prompt=f"{text} and more") == first[text]


def test_the_gateway_and_pools_share_what_the_picker_knows(pool: PoolGateway, pod: GatewayPod) -> None:
    for letter in "vwxyz":
        first = ask_idle(pool, pod, prompt=letter * 2000)
        wait_for_idle(pod)
        assert pod.ask("m", prompt=f"{letter * 2000} and more").json()["served_by"] == first


@pytest.mark.parametrize("num_bytes", [0, 1 << 10, 3 << 20, 16 << 20])
def test_a_replica_gets_the_body_as_it_was_sent(pool: PoolGateway, replicas: Pair, num_bytes: int) -> None:
    body = json.dumps({"model": "m", "prompt": "x" * num_bytes}).encode()
    assert pool.post(body).json()["bytes"] == len(body)
    assert pool.post(body[start : start + 100_000] for start in range(0, len(body), 100_000)).status_code == 200
    assert [each.body == body for replica in replicas for each in replica.received] == [True, True]


def test_a_body_that_is_too_large_is_refused_with_the_remedy(pool: PoolGateway, replicas: Pair) -> None:
    response = pool.post(json.dumps({"model": "m", "prompt": "x" * (18 << 20)}).encode())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
    assert "send a shorter prompt" in response.json()["error"]["message"]
    assert not any(replica.received for replica in replicas)


def test_events_arrive_when_the_replica_sends_them(pool: PoolGateway, replicas: Pair) -> None:
    body = {"model": "m", "events": 4, "gated": True}
    with httpx.stream("POST", f"{pool.url}/v1/completions", json=body, timeout=CLIENT_SECONDS) as response:
        (serving,) = [replica for replica in replicas if replica.received]
        serving.permit()
        lines = []
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            serving.permit()  # the next event is sent only now
    assert lines == [*(f"data: {serving.name} {number}" for number in range(4)), "data: [DONE]"]


def test_only_replicas_of_the_subset_get_requests(pool: PoolGateway, pod: GatewayPod, replicas: Pair) -> None:
    a, b = replicas
    for hint, name in ((a.address, "a"), (b.address, "b"), (f"10.9.9.9:8000, {a.address}", "a")):
        for _ in range(4):
            wait_for_idle(pod)
            assert pool.post({"model": "m"}, subset=hint).json()["served_by"] == name
    response = pool.post({"model": "m"}, subset="10.9.9.9:8000")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_ready_replica")


def test_a_request_without_a_ready_replica_is_refused_and_not_held(
    pool: PoolGateway, pod: GatewayPod, api: ApiServerStandIn
) -> None:
    api.endpoints("m")
    wait_until(lambda: pod.demand()["deployments"]["default/m"]["readyReplicas"] == 0, "no replica is ready")
    response = pool.post({"model": "m"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "10")
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("no_ready_replica", "service_unavailable")
    assert "not held" in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "code", "remedy"),
    [
        (b'{"model": "none"}', 404, "model_not_found", "use one of: m"),
        (b'{"prompt": "x"}', 400, "missing_model", "set it to a name that GET /v1/models lists"),
        (b'{"model": 1}', 400, "invalid_model", "set it to a model's name"),
        (b"{", 400, "invalid_json", "not a JSON object"),
    ],
)
def test_a_bad_request_gets_an_error_with_the_remedy(
    pool: PoolGateway, replicas: Pair, body: bytes, status: int, code: str, remedy: str
) -> None:
    response = pool.post(body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert remedy in response.json()["error"]["message"]
    assert not any(replica.received for replica in replicas)


def test_a_pool_serves_its_own_model_whoever_else_has_its_name(
    pool: PoolGateway, pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    api.deployment("m", namespace="other", created="2025-01-01T00:00:00Z")
    api.deployment("later")
    wait_until(lambda: "default/later" in pod.demand()["deployments"], "the older one is known, too")
    assert pool.post({"model": "m"}).status_code == 200
    assert pool.post({"model": "default/m", "prompt": "x"}).status_code == 200
    assert json.loads(max((each.body for replica in replicas for each in replica.received), key=len)) == {
        "model": "m",
        "prompt": "x",
    }
    assert pool.post({"model": "other/m"}).status_code == 404


def test_a_request_without_a_body_reaches_a_replica(pool: PoolGateway, replicas: Pair) -> None:
    httpx.get(f"{pool.url}/v1/models", timeout=CLIENT_SECONDS)
    assert [each.path for replica in replicas for each in replica.received] == ["/v1/models"]


def test_a_canarys_replicas_are_not_in_the_pool_and_keep_their_share_of_the_gateway(
    pool: PoolGateway, pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    stable, canary = replicas
    api.endpoints("m", stable.address)
    api.endpoints("m-canary", canary.address, owner="m")
    api.deployment("m", canary_percent=50)
    wait_until(lambda: {pod.ask("m").json()["served_by"] for _ in range(2)} == {"a", "b"}, "it has its share")
    served = [(ask_idle(pool, pod), pod.ask("m").json()["served_by"]) for _ in range(8)]
    assert {by_pool for by_pool, _ in served} == {"a"}
    assert sorted(by_gateway for _, by_gateway in served) == [*"aaaabbbb"]


def test_a_replica_that_did_not_answer_is_left_alone(pool: PoolGateway, pod: GatewayPod, replicas: Pair) -> None:
    a, b = replicas
    a.stop()
    before = pod.values("fastgen_gateway_retries_total").get(("m", "default"), 0.0)
    for _ in range(4):
        assert ask_idle(pool, pod) == "b"
    wait_until(lambda: pod.values("fastgen_gateway_retries_total")["m", "default"] > before, "a retry is counted")
    assert pod.values("fastgen_gateway_retries_total")["m", "default"] < before + 4
    assert len(b.received) == 4


def test_the_end_of_a_request_is_counted(pool: PoolGateway, pod: GatewayPod, replicas: Pair) -> None:
    body = {"model": "m", "events": 10_000, "gap": 0.1}
    with httpx.stream("POST", f"{pool.url}/v1/completions", json=body, timeout=CLIENT_SECONDS) as response:
        lines = response.iter_lines()
        next(lines)
        assert pod.demand()["deployments"]["default/m"]["running"] == 1
        next(lines)
    wait_until(lambda: sum(replica.num_disconnects for replica in replicas) == 1, "the replica sees the client leave")
    wait_for_idle(pod)


@pytest.mark.parametrize("authority", ["m-picker.default:9002", "M-picker.default.svc.cluster.local"])
@pytest.mark.parametrize("tls", [True, False], ids=["TLS", "plain"])
def test_gateways_that_send_requests_where_the_header_says(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair, tmp_path: Path, authority: str, tls: bool
) -> None:
    a, _ = replicas
    expose(api, pod, "m", a)
    with PoolGateway(tmp_path, pod.ports.pools, [], authority, tls=tls, fails_open=False, by_header=True) as gateway:
        assert gateway.post({"model": "m"}).json()["served_by"] == "a"


@pytest.mark.parametrize(
    ("wrong", "status", "code"),
    [
        ({"authority": "none-picker.default.svc:9002"}, 503, "unknown_pool"),
        ({"authority": "m-picker.other.svc:9002"}, 503, "unknown_pool"),
        ({"authority": "picker"}, 503, "unknown_pool"),
        ({"request_mode": "BUFFERED"}, 500, "body_not_streamed"),
    ],
    ids=["no such resource", "other namespace", "no name", "not streamed"],
)
def test_a_gateway_that_the_picker_cannot_serve_gets_an_error_with_the_remedy(
    pod: GatewayPod,
    api: ApiServerStandIn,
    replicas: Pair,
    tmp_path: Path,
    wrong: dict[str, str],
    status: int,
    code: str,
) -> None:
    a, _ = replicas
    expose(api, pod, "named-like-another", a, model="default/none")
    expose(api, pod, "m", a)
    with PoolGateway(tmp_path, pod.ports.pools, [a.address], **wrong) as gateway:
        response = gateway.post({"model": "m"})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert "must" in response.json()["error"]["message"]
    assert a.received == []


def test_gateways_reach_the_health_service_and_no_other(pod: GatewayPod) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{pod.ports.pools}") as channel:
        for name in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            found = HealthStub(channel).Check(HealthCheckRequest(service=name), timeout=CLIENT_SECONDS)
            assert found.status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            AccessLogServiceStub(channel).StreamAccessLogs(iter(()), timeout=CLIENT_SECONDS)


@pytest.mark.parametrize(
    ("hint", "wanted"),
    [
        (None, None),
        ({}, None),
        ({"x-gateway-destination-endpoint-subset": []}, set()),
        ({"x-gateway-destination-endpoint-subset": ""}, set()),
        ({"x-gateway-destination-endpoint-subset": ["10.0.0.1:8000", "10.0.0.2"]}, {"10.0.0.1:8000", "10.0.0.2"}),
        ({"x-gateway-destination-endpoint-subset": "[fd00::1]:8000, 10.0.0.2"}, {"[fd00::1]:8000", "10.0.0.2"}),
    ],
)
def test_a_hint_may_be_a_list_or_a_text(hint: dict[str, object] | None, wanted: set[str] | None) -> None:
    message = ProcessingRequest()
    if hint is not None:
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    assert subset(message) == wanted


def test_requests_wait_while_the_picker_restarts(pool: PoolGateway, pod: GatewayPod) -> None:
    assert pool.post({"model": "m"}).status_code == 200
    pod.kill_picker()
    with ThreadPoolExecutor() as threads:
        sent = [threads.submit(pool.post, {"model": "m", "prompt": "x" * size}) for size in (0, 1000, 200_000)]
        try:
            wait_until(lambda: pod.envoy_metrics().count(_WAITING) == 1, "calls of the Gateway wait")
        finally:
            pod.start_picker()
            pod.wait_ready()
        assert [each.result().status_code for each in sent] == [200] * 3


@pytest.mark.parametrize("fails_open", [True, False])
def test_without_a_gateway_pod_the_failure_mode_decides_on_requests_without_a_body(
    replicas: Pair, tmp_path: Path, fails_open: bool
) -> None:
    """Of a request with a body, Envoy may have sent a piece, which is lost: it then fails in either mode."""
    a, _ = replicas
    nothing = free_ports(1)[0]
    with PoolGateway(tmp_path, nothing, [a.address], fails_open=fails_open) as gateway:
        response = httpx.get(f"{gateway.url}/v1/models", timeout=CLIENT_SECONDS)
    assert len(a.received) == int(fails_open)
    assert fails_open or response.status_code == 500
