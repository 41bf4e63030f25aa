"""Requests through the real Envoy to stand-ins for replicas, chosen by the picker."""

from __future__ import annotations

import json

import httpx
import pytest

from gateway.gateway_pod import CLIENT_SECONDS, GatewayPod, expose, wait_for_idle, wait_for_ready
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]


def ask_idle(pod: GatewayPod, **fields: object) -> str:
    """Send a request once no other is counted as running, and return the replica that has served it."""
    wait_for_idle(pod)
    served_by: str = pod.ask("m", **fields).json()["served_by"]
    return served_by


def test_the_model_of_the_body_chooses_the_deployment(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    a, b = replicas
    expose(api, pod, "chat", a)
    expose(api, pod, "code", b, model="coder")
    for model, name in (("chat", "a"), ("coder", "b"), ("chat", "a")):
        response = pod.ask(model)
        assert response.status_code == 200, response.text
        assert response.json()["served_by"] == name


def test_a_namespace_and_name_choose_one_deployment_and_become_its_model(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    a, b = replicas
    expose(api, pod, "old", a, model="m")
    api.deployment("new", model="m", created="2026-02-02T00:00:00Z")
    api.endpoints("new", b.address)
    wait_until(lambda: pod.get("/v1/models").json()["data"][1:], "both are listed")
    assert {pod.ask("m").json()["served_by"] for _ in range(4)} == {"a"}
    wait_until(lambda: pod.ask("default/new").status_code == 200, "the other one serves")
    response = pod.ask("default/new", prompt="as it was")
    assert (response.json()["served_by"], response.json()["model"]) == ("b", "m")
    assert json.loads(b.received[-1].body) == {"model": "m", "prompt": "as it was"}


def test_the_list_of_models_has_each_exposed_model_once(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "old", replicas[0], model="m")
    api.deployment("new", model="m", created="2026-02-02T00:00:00Z")
    wait_until(lambda: len(pod.get("/v1/models").json()["data"]) == 2, "both are listed")
    listed = pod.get("/v1/models").json()
    assert [(each["id"], each["object"], each["owned_by"]) for each in listed["data"]] == [
        ("default/new", "model", "default/new"),
        ("m", "model", "default/old"),
    ]
    assert listed["data"][1]["created"] == 1767225600
    assert pod.get("/v1/models/default%2Fnew").json()["id"] == "default/new"
    assert pod.get("/v1/models/none").status_code == 404


def test_events_arrive_when_the_replica_sends_them(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    a = replicas[0]
    expose(api, pod, "m", a)
    a.permit()
    body = {"model": "m", "events": 4, "gated": True}
    with httpx.stream("POST", f"{pod.url}/v1/completions", json=body, timeout=CLIENT_SECONDS) as response:
        lines = []
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            a.permit()  # the next event is sent only now
    assert lines == ["data: a 0", "data: a 1", "data: a 2", "data: a 3", "data: [DONE]"]


def test_the_replica_gets_the_body_and_path_as_sent(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "m", replicas[0])
    body = b' {"prompt": "\\u00e4 \xc3\xa4", "x": 1.50, "model":"m" }'
    assert pod.post(body, "/v1/chat/completions?beta=1").status_code == 200
    assert replicas[0].received[-1].body == body
    assert replicas[0].received[-1].path == "/v1/chat/completions?beta=1"


def test_requests_of_a_model_are_shared_by_its_replicas(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "m", *replicas)
    served = [ask_idle(pod) for _ in range(10)]
    assert served.count("a") == served.count("b") == 5


def test_prompts_that_begin_alike_go_to_one_replica(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "m", *replicas)
    texts = [letter * 2000 for letter in "xyz"]
    first = {text: ask_idle(pod, prompt=text) for text in texts}
    assert set(first.values()) == {"a", "b"}
    for text in (*texts, *texts):
        assert ask_idle(pod, prompt=f"{text} and more") == first[text]


def test_a_client_cannot_choose_the_replica(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    a, b = replicas
    expose(api, pod, "m", a)
    headers = {"x-gateway-destination-endpoint": b.address, "x-fallback-endpoint": b.address}
    assert pod.post({"model": "m"}, **headers).json()["served_by"] == "a"
    a.mode = "reset"
    assert pod.post({"model": "m"}, **headers).status_code == 503
    assert b.received == []


def retries_of(pod: GatewayPod) -> float:
    lines = [line for line in pod.metrics().splitlines() if line.startswith("fastgen_gateway_retries_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize("mode", ["reset", "draining", "stopped"])
def test_a_request_without_an_answer_is_retried_on_another_replica(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair, mode: str
) -> None:
    a, b = replicas
    expose(api, pod, "m", a, b)
    if mode == "stopped":
        a.stop()
    else:
        a.mode = mode
    bodies = [{"model": "m", "prompt": f"{number}" + "x" * 4_000_000} for number in range(4)]
    retries = retries_of(pod)
    responses = [pod.post(body) for body in bodies]
    assert [response.json()["served_by"] for response in responses] == ["b"] * 4
    assert [json.loads(each.body) for each in b.received] == bodies
    # The replica that did not answer is left alone for a second at least.
    wait_until(lambda: retries_of(pod) > retries, "a retry is counted")
    assert retries_of(pod) < retries + 4


def test_a_new_revision_gets_its_share_and_what_it_does_not_answer_is_retried_on_another(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    stable, canary = replicas
    expose(api, pod, "m", stable)
    api.endpoints("m-canary", canary.address, owner="m")
    api.deployment("m", canary_percent=25)
    wait_for_ready(pod, "m", 2)
    wait_until(lambda: pod.ask("m").json()["served_by"] == "b", "the new revision gets requests")
    served = [pod.ask("m", prompt="the same").json()["served_by"] for _ in range(40)]
    assert "".join(served) == "aaab" * 10
    canary.mode = "reset"
    assert [pod.ask("m").json()["served_by"] for _ in range(40)] == ["a"] * 40, "none fails"
    canary.mode = "serve"
    wait_until(lambda: pod.ask("m").json()["served_by"] == "b", "the new revision gets requests again")
    api.deployment("m")
    api.deployment("later")
    wait_until(lambda: "default/later" in pod.demand()["deployments"], "the change before is known, too")
    last = len(canary.received)
    assert {pod.ask("m").json()["served_by"] for _ in range(20)} == {"a"}
    assert len(canary.received) == last


def test_an_error_of_a_replica_that_is_not_draining_is_passed_on(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    a, b = replicas
    expose(api, pod, "m", a, b)
    a.mode = b.mode = "busy"
    response = pod.ask("m")
    assert response.status_code == 503
    assert response.json() == {"error": {"code": "queue_full"}}
    assert len(a.received) + len(b.received) == 1


def test_a_request_that_no_replica_answers_gets_an_error_in_the_usual_format(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, pod, "m", *replicas)
    for replica in replicas:
        replica.stop()
    response = pod.ask("m")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "replica_failed"
    assert "try again" in response.json()["error"]["message"]


def test_a_stream_that_its_replica_cuts_ends_with_an_error_and_is_not_repeated(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, pod, "m", *replicas)
    body = {"model": "m", "events": 9, "cut": 2, "gap": 0.1}
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{pod.url}/v1/completions", json=body, timeout=CLIENT_SECONDS) as response,
    ):
        response.read()
    assert sum(len(replica.received) for replica in replicas) == 1


def test_a_terminating_replica_gets_no_new_request(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    a, b = replicas
    expose(api, pod, "m", a, b)
    api.endpoints("m", a.address, leaving=(b.address,))
    wait_for_ready(pod, "m", 1)
    assert {pod.ask("m").json()["served_by"] for _ in range(6)} == {"a"}


def test_a_client_that_leaves_ends_its_request_at_the_replica(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    a = replicas[0]
    expose(api, pod, "m", a)
    body = {"model": "m", "events": 10_000, "gap": 0.1}
    with httpx.stream("POST", f"{pod.url}/v1/completions", json=body, timeout=CLIENT_SECONDS) as response:
        next(response.iter_lines())
    wait_until(lambda: a.num_disconnects == 1, "the replica sees the client leave")
    line = 'fastgen_gateway_requests_running{name="m",namespace="default"} 0.0'
    wait_until(lambda: line in pod.metrics(), "the picker counts it as ended")
