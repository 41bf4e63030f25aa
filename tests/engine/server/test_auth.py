"""API keys from a file and from the environment."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from engine.server.serving import Serving, serving
from fastgen.server.http.auth import KeyRing
from fastgen.settings import ConfigError
from support.waiting import wait_until

KEY = "sk-of-the-file-1"


@dataclass
class Locked:
    server: Serving
    key_file: Path


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("locked")
    key_file = folder / "keys"
    key_file.write_text(f"# team a\n{KEY}\n\n  sk-of-the-file-2  \n")
    options = ("--api-key-file", str(key_file), "--allowed-origins", "https://page.example")
    with serving(folder, *options, environment={"FASTGEN_API_KEY": "sk-env-1, sk-env-2"}) as server:
        server.wait_status("/ready", 200)
        yield Locked(server, key_file)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "path", ["/v1/models", "/version", "/docs", "/openapi.json", "/nowhere", "/health/", "//metrics"]
)
def test_every_path_except_probes_and_metrics_requires_a_key(locked: Locked, path: str) -> None:
    response = locked.server.get(path)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.json()["error"] == {
        "message": "no API key: send Authorization: Bearer KEY",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_and_metrics_need_no_key(locked: Locked, path: str) -> None:
    assert locked.server.status(path) == 200


@pytest.mark.parametrize("key", [KEY, "sk-of-the-file-2", "sk-env-1", "sk-env-2"])
def test_every_key_from_the_file_and_the_environment_is_accepted(locked: Locked, key: str) -> None:
    assert locked.server.get("/v1/models", headers=bearer(key)).status_code == 200


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer sk-of-the-file", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer # team a"],
)
def test_any_other_credential_is_rejected(locked: Locked, given: str) -> None:
    assert locked.server.get("/v1/models", headers={"Authorization": given}).status_code == 401


@pytest.mark.parametrize("given", ["first", "second", "third", "neither"])
def test_a_key_is_compared_with_all_keys_in_constant_time(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = KeyRing(None, {"FASTGEN_API_KEY": "first,second,third"})
    assert (keys.identify(f"Bearer {given}") is not None) == (given != "neither")
    assert len(compared) == 3, "whichever key is valid"
    assert {len(one) == len(other) == 32 for one, other in compared} == {True}


def test_the_openai_client_raises_its_authentication_error(locked: Locked) -> None:
    with pytest.raises(openai.AuthenticationError, match="the API key is not valid: send"):
        locked.server.client().models.list()


def test_a_rejection_is_counted_and_no_key_is_logged(locked: Locked) -> None:
    locked.server.get("/v1/models", headers=bearer("sk-wrong"))
    assert locked.server.metric("fastgen_request_rejected_total", reason="invalid_api_key") >= 1
    assert "sk-" not in locked.server.log
    assert "rejected status=401 code=invalid_api_key" in locked.server.log


def test_a_changed_key_file_takes_effect_without_a_restart(locked: Locked) -> None:
    def opens(key: str) -> bool:
        return locked.server.get("/version", headers=bearer(key)).status_code == 200

    def replace(keys: str) -> None:
        """Write the file as Kubernetes does: the server must not read a part of it."""
        replacement = locked.key_file.with_suffix(".new")
        replacement.write_text(keys)
        os.replace(replacement, locked.key_file)

    before = locked.key_file.read_text()
    replace("sk-rotated\n")
    wait_until(lambda: opens("sk-rotated"), "the new key to take effect")
    assert not opens(KEY)
    assert opens("sk-env-1")
    replace("# nothing\n")
    wait_until(lambda: "keeping the previous keys" in (opens("x"), locked.server.log)[1], "the empty file to be read")
    assert opens("sk-rotated")
    replace(before)
    wait_until(lambda: opens(KEY), "the old keys to take effect again")


def test_only_allowed_origins_get_cors_headers(locked: Locked) -> None:
    def allowed(origin: str) -> str | None:
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        fields = {"Origin": origin, **preflight}
        preflight_response = locked.server.request("OPTIONS", "/v1/completions", headers=fields)
        answered = locked.server.get("/v1/models", headers={"Origin": origin})  # errors must be readable too
        assert answered.headers.get("access-control-allow-origin") == preflight_response.headers.get(
            "access-control-allow-origin"
        )
        return preflight_response.headers.get("access-control-allow-origin")

    assert allowed("https://page.example") == "https://page.example"
    assert allowed("https://other.example") is None


def test_no_origin_is_allowed_by_default(scripted: Serving) -> None:
    answered = scripted.get("/v1/models", headers={"Origin": "https://page.example"})
    assert answered.status_code == 200
    assert "access-control-allow-origin" not in answered.headers


def test_keys_are_required_only_if_any_are_configured() -> None:
    assert not KeyRing(None, {})
    assert not KeyRing(None, {"FASTGEN_API_KEY": " ,\n"})
    assert KeyRing(None, {"FASTGEN_API_KEY": "a"}).identify("bearer a")


def test_a_key_file_without_a_key_is_rejected_at_startup(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(
        ConfigError, match=r"--api-key-file .*/empty: contains no key; give a file with one key per line"
    ):
        KeyRing(str(tmp_path / "empty"), {})
    with pytest.raises(ConfigError, match="No such file or directory; give a file"):
        KeyRing(str(tmp_path / "absent"), {})


@pytest.mark.parametrize("key", ["geh\u00e4im", "a\tb", "a\x7fb", "\ufeffa"])
def test_a_key_that_clients_cannot_send_is_rejected_at_startup(key: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"good\n{key}\n", newline="")
    remedy = "has a character other than printable ASCII; choose another key"
    for ring, where in (
        (lambda: KeyRing(str(tmp_path / "keys"), {}), "--api-key-file .*: key 2"),
        (lambda: KeyRing(None, {"FASTGEN_API_KEY": f"good,{key}"}), "FASTGEN_API_KEY: key 2"),
    ):
        with pytest.raises(ConfigError, match=f"{where} {remedy}"):
            ring()
