"""Environment variables that a source's library cannot use are named in one line, without a retry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.fetch.running import fetch
from fastgen.fetch.errors import AccessDenied, FetchError, settings_error
from fastgen.fetch.source import Source

STORE, HUB = "s3://weights/models/tiny", "hf://tests/tiny"
UNREACHABLE = "http://127.0.0.1:1"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without settings of boto, and a damaged file of settings in the current directory."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").write_text("[x\n")
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT_URL", "foo"),
        ("AWS_ENDPOINT_URL_S3", "http://"),
        ("AWS_ENDPOINT_URL", "ftp://127.0.0.1:1"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:99999"),
        ("AWS_PROFILE", "nobody"),
        ("AWS_DEFAULT_PROFILE", "nobody"),
        ("AWS_DEFAULT_REGION", "us east 1"),
        ("AWS_RETRY_MODE", "foo"),
        ("AWS_DEFAULTS_MODE", "foo"),
        ("AWS_REQUEST_CHECKSUM_CALCULATION", "foo"),
        ("AWS_S3_DISABLE_EXPRESS_SESSION_AUTH", "foo"),
        ("AWS_CONFIG_FILE", "damaged"),
        ("AWS_SHARED_CREDENTIALS_FILE", "damaged"),
    ],
)
def test_a_value_that_boto_cannot_use_is_named(plain: pytest.MonkeyPatch, name: str, value: str) -> None:
    plain.setenv(name, value)
    with pytest.raises(FetchError) as caught:
        Source(STORE).open(3.0).list()
    message = str(caught.value)
    assert message.startswith(f"{STORE}: ")
    assert message.endswith(f": correct {name}")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_ACCESS_KEY_ID", "AKIA1", "missing: AWS_SECRET_ACCESS_KEY: set both keys, or neither"),
        ("AWS_ACCESS_KEY_ID", "AKIA1\n", "AWS_ACCESS_KEY_ID contains a line break"),
        (
            "AWS_SECRET_ACCESS_KEY",
            "schlüssel",
            "AWS_SECRET_ACCESS_KEY contains a line break",
        ),
        ("AWS_SESSION_TOKEN", "one\ntwo", "AWS_SESSION_TOKEN contains a line break"),
    ],
)
def test_credentials_that_cannot_be_sent_are_named_and_not_shown(
    plain: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    plain.setenv(name, value)
    with pytest.raises(AccessDenied, match=words) as caught:
        Source(STORE).open(3.0)
    assert value.splitlines()[0] not in str(caught.value)


def test_an_error_that_quotes_no_variable_has_a_general_remedy(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "foo")
    with pytest.raises(FetchError, match=r"correct the variables AWS_\* and the files that they name$"):
        Source(STORE).open(3.0)


def test_a_bad_bucket_has_no_remedy_of_a_variable(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("AWS_ENDPOINT_URL", UNREACHABLE)
    with pytest.raises(FetchError, match="Invalid bucket name") as caught:
        Source(f"s3://{'a' * 300}/models").open(3.0).list()
    assert "correct" not in str(caught.value)


def test_a_variable_is_named_only_where_its_whole_value_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X_PORT", "1")
    monkeypatch.setenv("X_NAME", "foo")
    monkeypatch.setenv("X_EMPTY", "")

    def told(text: str) -> str:
        return str(settings_error("a", ValueError(text), "X_", otherwise="correct X_*"))

    assert told("foo is at 127.0.0.1:8001.") == "a: foo is at 127.0.0.1:8001: correct X_NAME"
    assert told("got 'foo' and 1") == "a: got 'foo' and 1: correct X_NAME or X_PORT"
    assert told("food of x-foo") == "a: food of x-foo: correct X_*"
    assert told("unset X_NAME, which is foo") == "a: unset X_NAME, which is foo"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"HF_ENDPOINT": "foo"}, "HF_ENDPOINT must begin with https:// or http://"),
        ({"HF_ENDPOINT": "http://["}, "Invalid IPv6 URL: correct HF_ENDPOINT"),
        ({"HF_ENDPOINT": UNREACHABLE, "HF_HUB_ETAG_TIMEOUT": "x"}, ": correct HF_HUB_ETAG_TIMEOUT"),
        ({"HF_ENDPOINT": UNREACHABLE, "HF_TOKEN": "schlüssel"}, "correct HF_TOKEN"),
        ({"HF_ENDPOINT": UNREACHABLE, "HTTP_PROXY": "ftp://proxy"}, ": correct HTTP_PROXY"),
        ({"HF_ENDPOINT": UNREACHABLE, "HF_HUB_OFFLINE": "1"}, "unset the `HF_HUB_OFFLINE` environment variable"),
    ],
)
def test_a_value_that_the_hubs_library_cannot_use_is_named(tmp_path: Path, more: dict[str, str], words: str) -> None:
    ended = fetch(HUB, "--to", tmp_path / "one", **{"NO_PROXY": "", **more})
    assert ended.code == 1, ended.output
    assert len(ended.output.splitlines()) == 1, ended.output
    assert ended.last.startswith(f"fastgen: error: {HUB}")
    assert words in ended.last
