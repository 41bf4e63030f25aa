"""Without an API key, web pages cannot use the server by making a browser take it for their own."""

from __future__ import annotations

import pytest

from engine.server.serving import Serving, serving

ORIGIN = {"Origin": "http://evil.example:8000"}
CHROME = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)", "Accept-Language": "en"}


def status(server: Serving, host: str, headers: dict[str, str]) -> int:
    return server.get("/v1/models", headers={"Host": host, **headers}).status_code


@pytest.mark.parametrize(
    "headers", [ORIGIN, CHROME, {"Referer": "http://evil.example:8000/"}, {"Accept-Language": "de"}]
)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example."]
)
def test_a_page_that_rebinds_its_name_is_rejected(scripted: Serving, host: str, headers: dict[str, str]) -> None:
    response = scripted.get("/v1/models", headers={"Host": host, **headers})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "host",
    ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "[fe80::1%25eth0]", "10.1.2.3", "fastgen", "fastgen:8000",
     "a.localhost", "LOCALHOST."],
)  # fmt: skip
def test_a_browser_may_use_addresses_and_local_names(scripted: Serving, host: str) -> None:
    assert status(scripted, host, {**CHROME, "Origin": f"http://{host}"}) == 200


@pytest.mark.parametrize("host", ["llm.example", "fastgen.default.svc.cluster.local:8000", "evil.example"])
@pytest.mark.parametrize("headers", [{}, {"Accept-Language": "*", "User-Agent": "node"}, {"User-Agent": "curl/8.5.0"}])
def test_other_programs_may_use_any_name(scripted: Serving, host: str, headers: dict[str, str]) -> None:
    """So Services and ingresses need no setting."""
    assert status(scripted, host, headers) == 200


@pytest.mark.parametrize("key", ["", "k"])
def test_a_list_of_hosts_is_enforced_for_all_clients(tmp_path_factory: pytest.TempPathFactory, key: str) -> None:
    options, own = ("--allowed-hosts", "llm.example, *.corp.example"), {"Authorization": f"Bearer {key}"} if key else {}
    with serving(tmp_path_factory.mktemp("listed"), *options, environment={"FASTGEN_API_KEY": key}) as server:
        server.wait_status("/ready", 200)
        assert status(server, "llm.example:443", own) == 200
        assert status(server, "a.corp.example", ORIGIN | own) == 200
        assert status(server, "10.0.0.7:8000", own) == 200, "the kubelet and Prometheus use the pod's address"
        for other in ("evil.example", "corp.example", "llm.example.evil.example"):
            assert status(server, other, own) == 403


def test_with_an_api_key_any_name_is_allowed(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("keyed"), environment={"FASTGEN_API_KEY": "k"}) as server:
        server.wait_status("/ready", 200)
        assert status(server, "llm.example", {**ORIGIN, "Authorization": "Bearer k"}) == 200
        assert status(server, "llm.example", ORIGIN) == 401


WARNING = "no API key is configured"


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", "", True), ("127.0.0.1", "", False), ("0.0.0.0", "k", False)],
)
def test_a_server_without_a_key_that_others_can_reach_says_so(
    tmp_path_factory: pytest.TempPathFactory, host: str, key: str, warned: bool
) -> None:
    folder = tmp_path_factory.mktemp("warned")
    with serving(folder, "--host", host, environment={"FASTGEN_API_KEY": key}) as server:
        server.wait_status("/ready", 200)
        assert (WARNING in server.log) == warned


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_loads_scripts_of_another_site(scripted: Serving, path: str) -> None:
    response = scripted.get(path)
    assert response.status_code == 404
    assert "/openapi.json" in response.json()["error"]["message"]
    assert scripted.get("/openapi.json").status_code == 200


def test_no_response_shows_where_the_model_lies(scripted: Serving) -> None:
    for path in ("/v1/models", "/v1/models/smollm2", "/version", "/metrics", "/openapi.json", "/ready", "/load"):
        assert ".gguf" not in scripted.get(path).text, path
