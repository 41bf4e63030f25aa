"""Downloads through a forward proxy, from a server whose certificate a private authority signed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.fetch.connecting import Tunnels, forward_proxy, over_tls
from engine.fetch.running import Ended, fetch, names
from fastgen_operator.children.platform import PodSettings
from support.hub import serving

pytestmark = pytest.mark.slow  # each starts a process or two


@pytest.fixture
def secure_hub(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a hub over TLS, and the certificate of its authority."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(b"GGUF" + bytes(100_000))
    with serving(folder) as hub, over_tls(int(hub.url.rpartition(":")[2]), tmp_path / "pki") as secure:
        yield secure


@pytest.fixture
def proxy() -> Iterator[Tunnels]:
    with forward_proxy() as tunnels:
        yield tunnels


def download(to: Path, hub: str, settings: PodSettings, authority: Path | None = None) -> Ended:
    """Download with the variables that the operator sets; `authority` stands for the mounted file."""
    variables = {each["name"]: each["value"] for each in settings.environment}
    if settings.ca_config_map:
        files = {name: str(authority) for name, value in variables.items() if value.endswith("/ca.crt")}
        assert files.keys() == {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"}
        variables |= files
    return fetch("hf://tests/tiny/tiny.gguf", "--to", to, HF_ENDPOINT=hub, **{"NO_PROXY": "", **variables})


def test_a_download_goes_through_the_proxy_and_trusts_the_given_authority(
    secure_hub: tuple[str, Path], proxy: Tunnels, tmp_path: Path
) -> None:
    url, authority = secure_hub
    settings = PodSettings(https_proxy=proxy.url, ca_config_map="authorities")
    ended = download(tmp_path / "one", url, settings, authority)
    assert ended.code == 0, ended.output
    assert names(tmp_path / "one") == ["tiny.gguf"]
    assert set(proxy.targets) == {url.removeprefix("https://")}
    proxy.targets.clear()
    direct = PodSettings(https_proxy=proxy.url, no_proxy="localhost", ca_config_map="authorities")
    assert download(tmp_path / "two", url, direct, authority).code == 0
    assert proxy.targets == []


def test_an_unknown_authority_is_named_with_the_remedy_without_a_retry(
    secure_hub: tuple[str, Path], tmp_path: Path
) -> None:
    ended = download(tmp_path / "one", secure_hub[0], PodSettings())
    assert ended.code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in ended.last
    assert "egress.caBundle in the operator's chart" in ended.last
    assert "trying again" not in ended.output


def test_an_object_store_is_reached_in_the_same_way(tmp_path: Path, proxy: Tunnels) -> None:
    """The store answers nothing useful: that it is asked at all shows that its certificate is trusted."""
    folder = tmp_path / "empty"
    folder.mkdir()
    with serving(folder) as hub, over_tls(int(hub.url.rpartition(":")[2]), tmp_path / "pki") as (url, authority):
        settings = PodSettings(https_proxy=proxy.url, ca_config_map="authorities")
        variables = {each["name"]: each["value"] for each in settings.environment}
        trusted = {name: str(authority) for name, value in variables.items() if value.endswith("/ca.crt")}
        arguments = ("s3://bucket/tiny.gguf", "--to", tmp_path / "one")
        ended = fetch(*arguments, AWS_ENDPOINT_URL=url, **{"NO_PROXY": "", **variables, **trusted})
        assert ended.code == 4, "the hub refuses a request without a token"
        assert set(proxy.targets) == {url.removeprefix("https://")}
        ended = fetch(*arguments, AWS_ENDPOINT_URL=url, NO_PROXY="", HTTPS_PROXY=proxy.url)
        assert "egress.caBundle in the operator's chart" in ended.last
