"""Models from an object store: a real S3 server over a folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config

from cluster.controlplane import free_ports
from cluster.gotools import VERSITYGW, ensure_tool
from engine.fetch.proxy import cutting
from engine.fetch.running import environment, fetch, fetch_each, marker, names
from support.waiting import eventually

pytestmark = pytest.mark.slow  # each starts a process or two

KEY, SECRET = "tests-access", "tests-secret"
WEIGHTS = bytes(range(256)) * 20_000  # five megabytes
FILES = {
    "models/tiny/config.json": b"{}",
    "models/tiny/tokenizer.json": b'{"a": 1}',
    "models/tiny/model.safetensors": WEIGHTS,
    "models/tiny/modeling_tiny.py": b"raise SystemExit",
    "models/tiny/original/config.json": b"of another folder",
    "models/tiny-2/config.json": b"of another model",
    "models/q4.gguf": b"GGUF" + WEIGHTS[:1000],
}


@dataclass(frozen=True)
class Store:
    """A running server with the bucket `weights`."""

    port: int
    s3: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def credentials(self, url: str | None = None, **more: str) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
            **more,
        }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    program = ensure_tool(VERSITYGW, lambda line: print(line, file=sys.stderr))
    folder = tmp_path_factory.mktemp("store")
    (folder / "data").mkdir()
    (folder / "meta").mkdir()
    (port,) = free_ports(1)
    command = [
        *(str(program), "--port", f"127.0.0.1:{port}", "--access", KEY, "--secret", SECRET, "--quiet"),
        *("posix", "--sidecar", str(folder / "meta"), str(folder / "data")),
    ]
    with (folder / "log").open("wb") as log, ExitStack() as stack:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        stack.callback(process.wait)
        stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: httpx.get(url).status_code > 0, within=30, what=f"the S3 server (log: {folder / 'log'})")
        s3 = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, proxies={}),
        )
        s3.create_bucket(Bucket="weights")
        for name, content in FILES.items():
            s3.put_object(Bucket="weights", Key=name, Body=content)
        yield Store(port, s3)


def test_a_prefix_is_downloaded_without_siblings_or_subfolders(store: Store, tmp_path: Path) -> None:
    to = tmp_path / "one"
    ended = fetch("s3://weights/models/tiny", "--to", to, **store.credentials())
    assert ended.code == 0, ended.output
    assert names(to) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (to / "model.safetensors").read_bytes() == WEIGHTS
    assert marker(to)["source"] == "s3://weights/models/tiny"


def test_one_file_is_downloaded_by_name(store: Store, tmp_path: Path) -> None:
    ended = fetch("s3://weights/models/q4.gguf", "--to", tmp_path / "one", **store.credentials())
    assert ended.code == 0, ended.output
    assert (tmp_path / "one" / "q4.gguf").read_bytes() == FILES["models/q4.gguf"]


REFUSED: list[tuple[str, int, str]] = [
    ("s3://nowhere/models/tiny", 3, "no such bucket"),
    ("s3://weights/models/none", 3, "no objects directly below it"),
    ("s3://weights/models/none.gguf", 3, "no such object"),
    ("s3://weights/models/tiny-2", 3, "holds no *.safetensors"),
]


def test_a_missing_object_is_named(store: Store, tmp_path: Path) -> None:
    commands = [[source, "--to", str(tmp_path / "one")] for source, *_ in REFUSED]
    for (source, code, words), ended in zip(REFUSED, fetch_each(commands, **store.credentials()), strict=True):
        assert ended.code == code, (source, ended.output)
        assert words in ended.last
        assert ended.last.startswith(f"fastgen: error: {source}")


@pytest.mark.parametrize(
    "more",
    [
        {"AWS_SECRET_ACCESS_KEY": "wrong"},
        {"AWS_ACCESS_KEY_ID": "nobody"},
    ],
)
def test_rejected_credentials_are_reported(store: Store, tmp_path: Path, more: dict[str, str]) -> None:
    sources = ("s3://weights/models/tiny", "s3://weights/models/q4.gguf")
    commands = [[source, "--to", str(tmp_path / "one")] for source in sources]
    for ended in fetch_each(commands, **store.credentials(**more)):
        assert ended.code == 4, ended.output
        assert "AWS_SECRET_ACCESS_KEY" in ended.last


def test_requests_without_credentials_are_anonymous(store: Store, tmp_path: Path) -> None:
    more = {"AWS_ENDPOINT_URL": store.url, "AWS_EC2_METADATA_DISABLED": "true"}
    ended = fetch("s3://weights/models/q4.gguf", "--to", tmp_path / "one", **more)
    assert ended.code == 4, ended.output


def test_a_broken_connection_is_resumed(store: Store, tmp_path: Path) -> None:
    with cutting(store.port) as proxy:
        proxy.cut_after = [1_500_000, 3_500_000]
        ended = fetch("s3://weights/models/tiny", "--to", tmp_path / "one", **store.credentials(proxy.url))
        assert ended.code == 0, ended.output
        assert ended.output.count("trying again") == 2
        assert (tmp_path / "one" / "model.safetensors").read_bytes() == WEIGHTS
        assert proxy.passed < 1.1 * len(WEIGHTS), "it began again"


def test_a_replaced_object_is_downloaded_completely(store: Store, tmp_path: Path) -> None:
    to = tmp_path / "one"
    store.s3.put_object(Bucket="weights", Key="changing.gguf", Body=WEIGHTS)
    assert fetch("s3://weights/changing.gguf", "--to", to, **store.credentials()).code == 0
    (to / ".fastgen" / "complete.json").unlink()
    store.s3.put_object(Bucket="weights", Key="changing.gguf", Body=WEIGHTS[::-1])
    assert fetch("s3://weights/changing.gguf", "--to", to, **store.credentials()).code == 0
    assert (to / "changing.gguf").read_bytes() == WEIGHTS[::-1]
