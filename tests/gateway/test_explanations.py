"""Why a request went where it went: in Envoy's access log, and in the response of a client that asks."""

from __future__ import annotations

from gateway.gateway_pod import GatewayPod, expose, wait_for_idle
from gateway.held_clients import HeldClients
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]


def logged(pod: GatewayPod, path: str) -> list[dict[str, object]]:
    return [line for line in pod.access_log if line["path"] == path]


def test_the_access_log_names_the_replica_and_the_tokens(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    a, b = replicas
    expose(api, pod, "m", a, b)
    body = {"model": "m", "prompt": "x" * 1022, "usage": [257, 3]}
    pod.post(body, "/v1/first?secret=1")
    wait_for_idle(pod)
    pod.post(body, "/v1/second")
    wait_until(lambda: logged(pod, "/v1/first") and logged(pod, "/v1/second"), "the requests are logged", 30)
    (first,), (second,) = logged(pod, "/v1/first"), logged(pod, "/v1/second")
    assert (first["deployment"], first["status"], first["tries"]) == ("default/m", 200, 1)
    assert (first["prompt_tokens"], first["cached_tokens"], first["held_seconds"]) == (257, 0, 0)
    assert (second["prompt_tokens"], second["cached_tokens"]) == (257, 256)
    assert first["replica"] == second["replica"]
    assert first["replica"] in (a.address, b.address)
    assert first["pod"] == f"m-{str(first['replica']).rpartition(':')[2]}"
    assert (first["reason"], second["reason"]) == ("fewest-requests", "prefix")
    assert first["usage_prompt_tokens"] is None, "only clients with keys are counted"


def test_the_access_log_tells_of_retries_and_refusals(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    a, b = replicas
    expose(api, pod, "m", a, b)
    a.mode = "reset"
    for number in range(2):
        pod.post({"model": "m", "prompt": f"{number}"}, "/v1/retried")
        wait_for_idle(pod)
    pod.post({"model": "none"}, "/v1/refused")
    # Envoy's threads log them in any order.
    wait_until(lambda: len(logged(pod, "/v1/retried")) == 2 and logged(pod, "/v1/refused"), "all are logged", 30)
    assert sorted(line["tries"] for line in logged(pod, "/v1/retried")) == [1, 2]  # type: ignore[type-var]
    assert {line["replica"] for line in logged(pod, "/v1/retried")} == {b.address}
    assert {line["pod"] for line in logged(pod, "/v1/retried")} == {f"m-{b.address.rpartition(':')[2]}"}
    (refused,) = logged(pod, "/v1/refused")
    assert (refused["status"], refused["deployment"], refused["details"]) == (404, None, "model_not_found")


def test_a_client_that_asks_gets_the_reasons_of_the_choice(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    a = replicas[0]
    expose(api, pod, "m", a)
    plain = pod.post({"model": "m"})
    assert not [name for name in plain.headers if name.startswith("x-fastgen")]
    headers = pod.post({"model": "m", "prompt": "x" * 1022}, **{"x-fastgen-explain": "1"}).headers
    assert {name: value for name, value in headers.items() if name.startswith("x-fastgen")} == {
        "x-fastgen-deployment": "default/m",
        "x-fastgen-pod": f"m-{a.address.rpartition(':')[2]}",
        "x-fastgen-replica": a.address,
        "x-fastgen-prompt-tokens": "257",
        "x-fastgen-held-seconds": "0.0",
    }


def test_the_time_of_a_hold_is_logged(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, pod, "m")
    clients = HeldClients(pod.ports.front, 1, {"model": "m", "prompt": "held"})
    wait_until(lambda: pod.demand()["deployments"]["default/m"]["oldestHeldSeconds"] > 0.2, "the request is held")
    api.endpoints("m", replicas[0].address)
    assert clients.wait() == {200: 1}
    wait_until(
        lambda: any(float(line["held_seconds"] or 0) > 0.2 for line in logged(pod, "/v1/completions")),  # type: ignore[arg-type]
        "the hold is logged", 30,
    )  # fmt: skip
