"""Keys and limits in the files of mounted Secrets and ConfigMaps."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastgen_gateway import client_files
from fastgen_gateway.client_files import ClientPaths, follow_clients, read_clients
from fastgen_gateway.routing.access import Clients
from fastgen_gateway.routing.client import Client
from fastgen_gateway.settings import parse_settings
from support.waiting import PATIENCE

URL = ("--api-server", "http://127.0.0.1:1")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder as the kubelet mounts a Secret with the keys of two clients."""
    folder, data = tmp_path / "keys", tmp_path / "keys" / "..2026_11_27"
    data.mkdir(parents=True)
    (data / "team-a").write_text("# of the notebooks\nk1\nk2\n")
    (data / "team-b").write_text("k3")
    (folder / "..data").symlink_to(data.name)
    for name in ("team-a", "team-b"):
        (folder / name).symlink_to(Path("..data") / name)
    return folder


def limits(folder: Path, **content: object) -> Path:
    path = folder.parent / "limits.json"
    path.write_text(json.dumps(content))
    return path


def test_each_file_has_the_keys_of_a_client(keys: Path) -> None:
    clients = read_clients(ClientPaths(keys))
    assert clients.table.clients == {"team-a": Client("team-a"), "team-b": Client("team-b")}
    assert len(clients.table) == 3
    assert clients.engine_keys == {}


def test_limits_are_the_clients_or_else_those_of_the_defaults(keys: Path) -> None:
    path = limits(
        keys,
        defaults={"tokensPerMinute": 100, "concurrentRequests": 2, "priority": 1, "namespaces": ["x"]},
        clients={"team-a": {"tokensPerMinute": 0, "namespaces": [], "priority": 0}, "unknown": {"priority": 4}},
    )
    clients = read_clients(ClientPaths(keys, path)).table.clients
    assert clients["team-a"] == Client("team-a", None, 2, 0, None)
    assert clients["team-b"] == Client("team-b", 100, 2, 1, frozenset({"x"}))


def test_an_engine_gets_the_first_key_of_its_file(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "ns.chat").write_text("one\ntwo\n")
    (tmp_path / "engines" / "ns").write_text("\n")
    assert read_clients(ClientPaths(keys, None, tmp_path / "engines")).engine_keys == {"ns.chat": "one"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"clients": {"a": {"tokensPerMinute": -1}}}, "limits.json: Expected `int` >= 0"),
        ({"clients": {"a": {"tokensPerMinute": "x"}}}, "limits.json: Expected `int | null`, got `str`"),
        ({"clients": {"a": {"tokens": 1}}}, "limits.json: Object contains unknown field `tokens`"),
        ({"defaults": {"priority": 1 << 31}}, "limits.json: Expected `int` <= 2147483647"),
        ({"client": {}}, "limits.json: Object contains unknown field `client`"),
    ],
)
def test_faulty_limits_are_named(keys: Path, content: dict[str, object], message: str) -> None:
    path = limits(keys, **content)
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        read_clients(ClientPaths(keys, path))


def test_a_faulty_key_is_named_and_not_shown(keys: Path) -> None:
    (keys / "team-c").write_text("schlüssel")
    with pytest.raises(ValueError, match=r"^team-c: key 1 has a character other than printable ASCII") as caught:
        read_clients(ClientPaths(keys))
    assert "schl" not in str(caught.value)


class Follower:
    """Follows files, and looks at them when the test says so."""

    def __init__(self, paths: ClientPaths, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_reads = 0
        self.read: list[Clients] = []
        self.faults: list[OSError] = []
        self._looks = asyncio.Semaphore(0)
        self._idle = asyncio.Event()
        monkeypatch.setattr(client_files, "read_clients", self._read)
        monkeypatch.setattr(client_files.asyncio, "sleep", self._sleep)
        self._task = asyncio.create_task(follow_clients(paths, self.read.append))

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            self._idle.clear()
            self._looks.release()
            await self._idle.wait()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    def _read(self, paths: ClientPaths) -> Clients:
        self.num_reads += 1
        if self.faults:
            raise self.faults.pop()
        return read_clients(paths)

    async def _sleep(self, _: float) -> None:
        self._idle.set()
        await self._looks.acquire()


def test_a_fault_is_logged_once_and_its_files_are_read_again_when_they_change(
    keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def follow() -> None:
        follower = Follower(ClientPaths(keys), monkeypatch)
        await follower.look(3)
        assert (follower.num_reads, len(follower.read)) == (1, 1)
        for number, text in enumerate(("k3", "k1\nk9"), start=1):
            (keys / "team-c").write_text(text)
            await follower.look(3)
            assert (follower.num_reads, len(follower.read), len(warnings())) == (1 + number, 1, number)
        (keys / "team-c").unlink()
        await follower.look(3)
        assert (follower.num_reads, len(follower.read), len(warnings())) == (4, 2, 2)
        await follower.stop()

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    asyncio.run(follow())


def test_files_that_cannot_be_read_are_tried_again(
    keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def follow() -> None:
        follower = Follower(ClientPaths(keys), monkeypatch)
        follower.faults = [OSError(24, "Too many open files")] * 2
        await follower.look(3)
        assert (follower.num_reads, len(follower.read)) == (3, 1)
        await follower.stop()

    asyncio.run(follow())
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("flag", ["--client-limits", "--engine-keys"])
def test_other_files_need_keys_of_clients(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings((*URL, flag, "x"))
    assert f"{flag}: requests need no key; set --client-keys, too" in capsys.readouterr().err


def test_the_picker_does_not_start_without_its_keys(keys: Path, tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "none", "No such file or directory"), (keys, "the same key")):
        (keys / "team-c").write_text("k3")
        command = [sys.executable, "-m", "fastgen_gateway.main", *URL, "--client-keys", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE * 60, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("fastgen-gateway: API keys and limits of clients: ")
        assert message in done.stderr
