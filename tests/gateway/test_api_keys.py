"""API keys, limits and priorities of clients, through the real Envoy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen_gateway.ext_proc import access_log
from fastgen_gateway.routing.client import Client, ClientTable
from gateway.gateway_pod import CLIENT_SECONDS, GatewayPod, client_options, expose, wait_for_idle
from gateway.held_clients import HeldClients
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.files import replace_text
from support.waiting import wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]

LIMITS = {
    "defaults": {"priority": 5},
    "clients": {
        "few-tokens": {"tokensPerMinute": 1000},
        "no-debt": {"tokensPerMinute": 1000},
        "leaving": {"tokensPerMinute": 1000},
        "refunded": {"tokensPerMinute": 1000},
        "one-request": {"concurrentRequests": 1},
        "first": {"priority": -3},
        "whole": {},
        "streamed": {},
        "by-bytes": {},
        "misled": {},
        "second-listener": {},
        "other-team": {"namespaces": ["other"]},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files of keys and limits are."""
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def _keyed(folder: Path, _api: ApiServerStandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayPod]:
    """A gateway with a key for each client of LIMITS and for `team`, and with one that a test rotates."""
    keys = {name: f"key-of-{name}\n" for name in ("team", *LIMITS["clients"])}
    engine_keys = {"default": "# of the namespace\nengine-key\nolder-engine-key\n"}
    options = client_options(folder, {**keys, "rotated": "old\n"}, LIMITS, engine_keys)
    started = GatewayPod(tmp_path_factory.mktemp("keyed"), _api.url, options)
    started.start()
    yield started
    started.stop()
    assert "Traceback" not in started.picker_log, started.picker_log
    assert "[lua]" not in (started.folder / "envoy.log").read_text(), "the filter that reads the usage has failed"


@pytest.fixture
def keyed(_keyed: GatewayPod, api: ApiServerStandIn) -> GatewayPod:
    """A gateway that asks for keys, without models."""
    wait_until(lambda: not _keyed.demand()["deployments"], "the models of the test before are gone")
    del api
    return _keyed


def bearer(client: str) -> str:
    return f"Authorization: Bearer key-of-{client}"


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "no API key: send Authorization: Bearer KEY"),
        ({"authorization": ""}, "no API key: send Authorization: Bearer KEY"),
        ({"authorization": "Bearer wrong"}, "the API key is not valid: send Authorization: Bearer KEY"),
        ({"authorization": "Bearer"}, "the API key is not valid: send Authorization: Bearer KEY"),
        ({"authorization": "Basic key-of-team"}, "the API key is not valid: send Authorization: Bearer KEY"),
        ({"authorization": "Bearer engine-key"}, "the API key is not valid: send Authorization: Bearer KEY"),
        ({"authorization": "Bearer key-of-team2"}, "the API key is not valid: send Authorization: Bearer KEY"),
    ],
)
def test_a_request_without_a_valid_key_is_rejected_before_its_body(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair, headers: dict[str, str], message: str
) -> None:
    expose(api, keyed, "m", replicas[0])
    for response in (
        keyed.post({"model": "m"}, **headers),
        keyed.get("/v1/models", **headers),
        keyed.post(b"not JSON", **headers),
    ):
        assert response.status_code == 401
        assert response.json()["error"] == {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    assert replicas[0].received == []


def test_the_key_is_checked_before_the_body_arrives(keyed: GatewayPod) -> None:
    with socket.create_connection(("127.0.0.1", keyed.ports.front), timeout=CLIENT_SECONDS) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 1000000\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 401"


def test_a_key_is_compared_with_all_keys_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    table = ClientTable([("a", Client("x")), ("b", Client("y")), ("c" * 100, Client("z"))])
    monkeypatch.setattr("fastgen_gateway.routing.client.hmac.compare_digest", compare)
    for given in ("a", "c" * 100, "", "d"):
        compared.clear()
        table.identify(f"Bearer {given}")
        assert len(compared) == 3
        assert {len(digest) for pair in compared for digest in pair} == {32}


def test_the_engine_gets_its_own_key_instead_of_the_clients(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])
    assert keyed.ask(key="key-of-team").status_code == 200
    (received,) = replicas[0].received
    assert received.headers["authorization"] == "Bearer engine-key"
    assert "key-of-team" not in str(received)


def test_a_client_with_a_key_learns_its_own_cached_tokens_and_the_reason(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", *replicas)

    def explained(client: str) -> tuple[str, str]:
        headers = {"authorization": f"Bearer key-of-{client}", "x-fastgen-explain": "1"}
        found = keyed.post({"model": "m", "prompt": "explained" * 100}, **headers).headers
        wait_for_idle(keyed)
        return found["x-fastgen-cached-tokens"], found["x-fastgen-reason"]

    assert explained("team") == ("0", "fewest-requests")
    assert explained("team") == ("192", "prefix")
    assert explained("first") == ("0", "fewest-requests")


def test_an_engine_without_a_key_gets_none(keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    api.deployment("x", namespace="other")
    api.endpoints("x", replicas[0].address, namespace="other")
    wait_until(lambda: keyed.ask("x", key="key-of-team").status_code == 200, "the model is ready")
    assert all("authorization" not in each.headers for each in replicas[0].received)


def test_without_keys_the_gateway_leaves_them_to_the_engines(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, pod, "m", replicas[0])
    pod.ask(key="whatever", priority=-9, cache_salt="s")
    (received,) = replicas[0].received
    assert received.headers["authorization"] == "Bearer whatever"
    assert json.loads(received.body) == {"model": "m", "priority": -9, "cache_salt": "s"}


def test_a_rotated_key_works_without_a_restart(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair, folder: Path
) -> None:
    expose(api, keyed, "m", replicas[0])
    assert keyed.ask(key="old").status_code == 200
    replace_text(folder / "keys" / "rotated", "new\nold\n")
    wait_until(lambda: keyed.ask(key="new").status_code == 200, "the new key is known")
    assert keyed.ask(key="old").status_code == 200
    replace_text(folder / "keys" / "rotated", "new\n")
    wait_until(lambda: keyed.ask(key="old").status_code == 401, "the old key is not valid any more")
    # Faulty files change nothing.
    replace_text(folder / "keys" / "twice", "new\n")
    wait_until(lambda: "have the same key; give each its own" in keyed.picker_log, "the fault is logged")
    assert keyed.ask(key="new").status_code == 200
    (folder / "keys" / "twice").unlink()
    replace_text(folder / "limits.json", '{"clients": {"team": {"tokensPerMinute": "many"}}}')
    wait_until(lambda: "limits.json: Expected" in keyed.picker_log, "the fault is logged")
    replace_text(folder / "limits.json", json.dumps(LIMITS))
    assert keyed.ask(key="new").status_code == 200


def test_two_clients_share_no_cached_prefix_and_none_can_take_anothers_place(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])

    def sent(client: str, **fields: object) -> dict[str, object]:
        assert keyed.ask(key=f"key-of-{client}", **fields).status_code == 200
        body: dict[str, object] = json.loads(replicas[0].received[-1].body)
        return body

    salts = [
        sent("team")["cache_salt"],
        sent("first")["cache_salt"],
        sent("team", cache_salt="a")["cache_salt"],
        sent("first", cache_salt="a")["cache_salt"],
        sent("first", cache_salt=sent("team")["cache_salt"])["cache_salt"],
    ]
    assert len(set(salts)) == 5
    assert sent("team", cache_salt=None)["cache_salt"] == salts[0]
    assert sent("team")["cache_salt"] == salts[0]


@pytest.mark.parametrize(
    ("client", "given", "priority"),
    [("team", {}, 5), ("team", {"priority": None}, 5), ("first", {}, -3), ("first", {"priority": -100}, -3),
     ("first", {"priority": 7}, 7)],
)  # fmt: skip
def test_the_engine_gets_the_clients_priority_or_a_lower_precedence(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair, client: str, given: dict[str, int | None], priority: int
) -> None:
    expose(api, keyed, "m", replicas[0])
    keyed.ask(key=f"key-of-{client}", **given)
    assert json.loads(replicas[0].received[0].body)["priority"] == priority


def test_a_field_that_is_given_twice_or_escaped_is_replaced(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])
    body = b'{"model":"m","priority":9,"prior\\u0069ty":-100,"cache_s\\u0061lt":"x","cache_salt":"y"}'
    assert keyed.post(body, authorization="Bearer key-of-team").status_code == 200
    text = replicas[0].received[0].body
    assert (text.count(b"priority"), text.count(b"cache_salt"), text.count(b"\\u")) == (1, 1, 0)
    assert json.loads(text)["priority"] == 5


@pytest.mark.parametrize("replica", [True, False], ids=["ready", "none"])
def test_a_name_that_is_not_utf8_is_rejected_and_nothing_of_the_request_stays(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair, replica: bool
) -> None:
    expose(api, keyed, "m", *replicas[: int(replica)])
    response = keyed.post(b'{"model":"m","\xff":1}', authorization="Bearer key-of-one-request")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert "'utf-8' codec can't decode byte 0xff in position 0" in response.json()["error"]["message"]
    demand = keyed.demand()["deployments"]["default/m"]
    assert (demand["held"], demand["running"]) == (0, 0)
    assert keyed.values("fastgen_gateway_client_requests_running")["one-request",] == 0
    assert replicas[0].received == []


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"priority": "high"}, "invalid_priority", "priority is not an integer; leave it out"),
        ({"priority": 1.5}, "invalid_priority", "priority is not an integer; leave it out"),
        ({"priority": [1]}, "invalid_priority", "priority is not an integer; leave it out"),
        ({"cache_salt": 1}, "invalid_cache_salt", "cache_salt is not a string; leave it out"),
    ],
)
def test_a_field_of_the_wrong_type_is_rejected(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair, fields: dict[str, object], code: str, message: str
) -> None:
    expose(api, keyed, "m", replicas[0])
    response = keyed.ask(key="key-of-team", **fields)
    assert response.status_code == 400
    error = {"message": message, "type": "invalid_request_error", "param": next(iter(fields)), "code": code}
    assert response.json()["error"] == error


def test_a_client_uses_only_the_models_of_its_namespaces(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])
    api.deployment("mine", namespace="other")
    api.endpoints("mine", replicas[1].address, namespace="other")
    wait_until(lambda: keyed.ask("mine", key="key-of-other-team").status_code == 200, "the model is ready")
    for name in ("m", "default/m"):
        response = keyed.ask(name, key="key-of-other-team")
        assert response.status_code == 404
        assert response.json()["error"]["message"] == f"the gateway has no model {name!r}; use one of: mine"
    listed = keyed.get("/v1/models", authorization="Bearer key-of-other-team").json()["data"]
    assert [model["id"] for model in listed] == ["mine"]
    assert keyed.get("/v1/models/m", authorization="Bearer key-of-other-team").status_code == 404
    assert keyed.get("/v1/models/m", authorization="Bearer key-of-team").status_code == 200
    assert replicas[0].received == []


def test_tokens_beyond_the_limit_are_rejected_until_a_minute_has_paid_for_them(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])
    assert keyed.ask(key="key-of-few-tokens", usage=[10, 2990]).status_code == 200
    limited = []

    def is_limited() -> bool:
        limited[:] = [keyed.ask(key="key-of-few-tokens", usage=[0, 0])]
        return limited[0].status_code == 429

    wait_until(is_limited, "the usage is counted")
    (response,) = limited
    assert response.json()["error"]["code"] == "tokens_per_minute_exceeded"
    assert response.json()["error"]["type"] == "rate_limit_error"
    seconds = int(response.headers["retry-after"])
    assert 60 < seconds <= 122, "2,000 tokens of debt take two minutes"
    message = f"few-tokens has used its limit of 1000 tokens per minute; try again in {seconds} s"
    assert response.json()["error"]["message"] == message
    assert keyed.ask(key="key-of-team").status_code == 200
    tokens = keyed.values("fastgen_gateway_client_tokens_total")
    assert tokens["few-tokens", "completion"] >= 2990


def test_a_prompt_is_charged_when_it_arrives(keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, keyed, "m", replicas[0])
    body = {"model": "m", "prompt": "x" * 3900, "seconds": 600}
    clients = HeldClients(keyed.ports.front, 5, body, bearer("no-debt"))
    # 976 tokens each: one is admitted, and leaves too few for another, for almost a minute.
    wait_until(lambda: clients.num_ended == 4, "the others are rejected")
    assert clients.statuses == {429: 4}


def test_a_client_that_leaves_before_the_response_pays_its_prompt_once(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])
    body = json.dumps({"model": "m", "prompt": "x" * 3000, "seconds": 600}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\n{bearer('leaving')}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", keyed.ports.front)) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: replicas[0].num_running == 1, "the request runs")
    counted = lambda: keyed.values("fastgen_gateway_client_tokens_total").get(("leaving", "prompt"))  # noqa: E731
    wait_until(lambda: counted() == 751, "its prompt is counted")
    running = lambda: keyed.values("fastgen_gateway_client_requests_running")["leaving",]  # noqa: E731
    wait_until(lambda: running() == 0, "it has ended")
    response = keyed.ask(key="key-of-leaving", prompt="x" * 4000)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) <= 46, "751 tokens take 46 s"


def test_what_no_replica_got_or_an_engine_rejected_is_not_charged(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])
    for _ in range(4):
        assert keyed.ask("none", key="key-of-refunded", prompt="x" * 3900).status_code == 404
    replicas[0].mode = "busy"
    ask = lambda: keyed.ask(key="key-of-refunded", prompt="x" * 3000).status_code  # noqa: E731
    for _ in range(4):
        wait_until(lambda: ask() == 503, "the request before is not charged any more")


@pytest.mark.parametrize("streamed", [False, True])
def test_the_usage_of_a_response_is_counted_and_logged(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair, streamed: bool
) -> None:
    expose(api, keyed, "m", replicas[0])
    client = "streamed" if streamed else "whole"
    # What a client writes itself does not count, also where the replica repeats it.
    fields = {"events": 3, "gap": 0.01} if streamed else {}
    path = f"/v1/usage-{streamed}"
    text = '"usage":{"prompt_tokens":999,"total_tokens":9999}'
    assert keyed.ask(path=path, key=f"key-of-{client}", usage=[12, 34], user=text, **fields).status_code == 200

    def counted(kind: str) -> float | None:
        return keyed.values("fastgen_gateway_client_tokens_total").get((client, kind))

    wait_until(lambda: (counted("prompt"), counted("completion")) == (12, 34), "the usage is counted")
    wait_until(lambda: [line for line in keyed.access_log if line["path"] == path], "the request is logged", 30)
    (line,) = [line for line in keyed.access_log if line["path"] == path]
    assert (line["client"], line["usage_prompt_tokens"], line["usage_completion_tokens"]) == (client, 12, 34)


def test_a_usage_that_is_split_between_packets_is_found(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])
    body = {"model": "m", "usage": [1234, 5], "padding": 70_000, "split": True}
    response = keyed.post(body, "/v1/split", authorization="Bearer key-of-team")
    assert response.json()["usage"]["prompt_tokens"] == 1234
    wait_until(lambda: [line for line in keyed.access_log if line["path"] == "/v1/split"], "the request is logged", 30)
    (line,) = [line for line in keyed.access_log if line["path"] == "/v1/split"]
    assert (line["usage_prompt_tokens"], line["usage_completion_tokens"]) == (1234, 5)


def test_a_stream_without_usage_is_counted_by_its_bytes(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])
    answer = keyed.ask(key="key-of-by-bytes", events=200)
    expected = len(answer.content) // access_log._BYTES_PER_EVENT
    assert expected > 5
    counted = lambda: keyed.values("fastgen_gateway_client_tokens_total").get(("by-bytes", "completion"))  # noqa: E731
    wait_until(lambda: counted() == expected, "its bytes are counted")


def test_a_usage_that_cannot_be_is_not_believed(keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    """A replica may be a tenant's own program."""
    expose(api, keyed, "m", replicas[0])
    num_bytes = [0]
    counted = lambda: keyed.values("fastgen_gateway_client_tokens_total").get(("misled", "completion"))  # noqa: E731
    for usage in ([10**12, 5], [5, -3], ["many", "more"], [10**400, 10**400]):
        response = keyed.ask(key="key-of-misled", usage=usage)
        assert response.status_code == 200
        num_bytes.append(num_bytes[-1] + len(response.content) // access_log._BYTES_PER_TOKEN)
        wait_until(lambda: counted() == num_bytes[-1], f"{usage} is counted by its bytes")


def test_requests_beyond_the_concurrent_ones_are_rejected_until_one_ends(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m")
    clients = HeldClients(keyed.ports.front, 1, {"model": "m"}, bearer("one-request"))
    running = lambda: keyed.values("fastgen_gateway_client_requests_running")[("one-request",)]  # noqa: E731
    wait_until(lambda: running() == 1, "the request is held")
    response = keyed.ask(key="key-of-one-request")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"] == {
        "message": "one-request has 1 concurrent requests, its limit; wait until one has ended",
        "type": "rate_limit_error",
        "param": None,
        "code": "concurrent_requests_exceeded",
    }
    api.endpoints("m", replicas[0].address)
    assert clients.wait() == {200: 1}
    wait_until(lambda: running() == 0, "it has ended")
    assert keyed.ask(key="key-of-one-request").status_code == 200


def test_held_requests_leave_by_priority(keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, keyed, "m")
    held = lambda: keyed.demand()["deployments"]["default/m"]["held"]  # noqa: E731
    later = HeldClients(keyed.ports.front, 30, {"model": "m", "seconds": 0.02, "user": "later"}, bearer("team"))
    wait_until(lambda: held() == 30, "they are held")
    sooner = HeldClients(keyed.ports.front, 30, {"model": "m", "seconds": 0.02, "user": "sooner"}, bearer("first"))
    wait_until(lambda: held() == 60, "all are held")
    api.endpoints("m", replicas[0].address)
    assert (later.wait(), sooner.wait()) == ({200: 30}, {200: 30})
    order = [json.loads(each.body)["user"] for each in replicas[0].received]
    # Those that are sent together arrive in any order.
    assert set(order[:20]) == {"sooner"}
    assert set(order[-20:]) == {"later"}


def test_without_a_picker_no_request_passes_without_a_key(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, keyed, "m", replicas[0])
    keyed.kill_picker()
    try:
        without = HeldClients(keyed.ports.front, 2, {"model": "m"})
        with_key = HeldClients(keyed.ports.front, 2, {"model": "m", "usage": [5, 6]}, bearer("second-listener"))
    finally:
        keyed.start_picker()
        keyed.wait_ready()
    assert without.wait() == {401: 2}
    assert with_key.wait() == {200: 2}
    assert {each.headers["authorization"] for each in replicas[0].received} == {"Bearer engine-key"}
    # They passed the second listener, whose responses are counted once.
    counted = ("second-listener", "completion")
    wait_until(lambda: keyed.values("fastgen_gateway_client_tokens_total").get(counted) == 12, "they are counted")


def test_keys_are_neither_logged_nor_in_metrics(keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    expose(api, keyed, "m", replicas[0])
    keyed.ask(path="/v1/logged", key="key-of-team")
    keyed.ask(path="/v1/logged", key="secret-but-wrong")
    keyed.ask(path="/v1/logged", key="key-of-other-team")
    wait_until(lambda: [line["path"] for line in keyed.access_log].count("/v1/logged") == 3, "all are logged", 30)
    lines = [line for line in keyed.access_log if line["path"] == "/v1/logged"]
    assert {(line["status"], line["client"]) for line in lines} == {(200, "team"), (401, None), (404, "other-team")}
    wait_until(lambda: " API keys of " in keyed.picker_log, "the picker has told that it read the keys")
    envoy_log = (keyed.folder / "envoy.log").read_text()
    for text in (keyed.picker_log, envoy_log, keyed.metrics(), keyed.envoy_metrics()):
        assert "key-of-" not in text
        assert "secret-but-wrong" not in text
        assert "engine-key" not in text
    assert keyed.values("fastgen_gateway_client_requests_total")["team", "routed"] >= 1
    assert keyed.values("fastgen_gateway_requests_total")["", "", "invalid_api_key"] >= 1
