"""Records of deployments, and their removal when processes exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastgen
from fastgen.mii import deployments
from fastgen.mii.deployments import Deployment, DeploymentError
from fastgen.settings import ConfigError


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def noted(name: str, pid: int, url: str = "http://127.0.0.1:9") -> Deployment:
    began = deployments.process_began(pid)
    assert began is not None
    deployment = Deployment(name=name, url=url, pid=pid, began=began, drain_seconds=1, log="the.log")
    deployments.note(deployment)
    return deployment


def ended() -> int:
    """Return the id of a process that has exited and has not been reaped."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.pid


def test_an_unknown_name_is_reported_with_the_known_ones() -> None:
    with pytest.raises(DeploymentError, match="'chat' is not known: there is none on this machine"):
        fastgen.client("chat")
    noted("other", os.getpid())
    with pytest.raises(DeploymentError, match="there are other; start it"):
        fastgen.client("chat")


@pytest.mark.parametrize("url", ["http://x", pytest.param("", id="it had not started")])
def test_a_server_that_exited_is_reported_once(url: str) -> None:
    pid = ended()
    deployments.note(Deployment(name="chat", url=url, pid=pid, began=1, drain_seconds=1, log="the.log"))
    with pytest.raises(DeploymentError, match="'chat' has ended"):
        fastgen.client("chat")
    with pytest.raises(DeploymentError, match="not known"):
        fastgen.client("chat")


def test_a_name_in_use_is_rejected_until_its_server_has_exited() -> None:
    noted("chat", os.getpid())
    with pytest.raises(DeploymentError, match="in use, at http"):
        deployments.reserve("chat")
    deployments.note(Deployment(name="chat", url="http://x", pid=ended(), began=1, drain_seconds=1, log=""))
    deployments.reserve("chat")
    assert deployments.find("chat").pid == os.getpid()
    with pytest.raises(DeploymentError, match="not ready yet"):
        fastgen.client("chat")


def test_a_reused_process_id_is_not_mistaken_for_the_server() -> None:
    deployment = noted("chat", os.getpid())
    assert deployment.alive
    assert not Deployment(**{**_fields(deployment), "began": deployment.began - 1}).alive


def _fields(deployment: Deployment) -> dict[str, object]:
    return {name: getattr(deployment, name) for name in Deployment.__slots__}


def test_an_unreadable_record_gives_the_remedy(runtime: Path) -> None:
    deployments.runtime_folder()
    (runtime / "fastgen" / "chat.json").write_text("{")
    with pytest.raises(DeploymentError, match="remove it"):
        fastgen.client("chat")


def test_a_folder_writable_by_others_is_rejected(runtime: Path) -> None:
    (runtime / "fastgen").mkdir()
    (runtime / "fastgen").chmod(0o777)
    with pytest.raises(DeploymentError, match="others can access this folder"):
        fastgen.client("chat")


@pytest.mark.parametrize("name", ["", "../up", "a b", "x" * 64])
def test_a_name_that_is_not_a_valid_file_name_is_rejected(name: str) -> None:
    for use in (deployments.reserve, fastgen.client):
        with pytest.raises(DeploymentError, match="letters"):
            use(name)


def test_settings_are_validated_before_the_server_starts(runtime: Path) -> None:
    for settings, said in (
        ({"replica_num": 2}, "FastGenDeployment"),
        ({"token_budget": 0}, "--token-budget 0"),
        ({"no_such": 1}, "no_such: no such setting"),
        ({}, "no such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            fastgen.serve("nothing.gguf", "chat", **settings)  # type: ignore[arg-type]
    assert not list(runtime.glob("fastgen/*.json"))
