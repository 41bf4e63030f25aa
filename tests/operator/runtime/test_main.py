"""Start and exit of the program."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import kopf
import pytest

from cluster.controlplane import free_ports
from fastgen_operator.children.platform import Platform
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.runtime.informers import kinds_read, kopf_settings
from fastgen_operator.runtime.settings import Settings
from harness.process import PROGRAM, OperatorProcess
from support.forking import fork_server
from support.waiting import eventually

UNREACHABLE = """
apiVersion: v1
kind: Config
current-context: none
clusters: [{name: none, cluster: {server: "http://127.0.0.1:%d"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
users: [{name: none, user: {}}]
"""


@pytest.fixture
def unreachable(tmp_path: Path) -> Path:
    """A kubeconfig of an API server that does not respond."""
    path = tmp_path / "kubeconfig"
    path.write_text(UNREACHABLE % free_ports(1)[0])
    return path


def run_operator(kubeconfig: Path, *arguments: str) -> tuple[int, str]:
    """Run the operator until it exits by itself; return the exit status and its output."""
    log = kubeconfig.with_name("log")
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    process = fork_server(PROGRAM).start(["--engine-image", "e", *arguments], log, environment)
    return process.wait(300), log.read_text()


def test_missing_credentials_exit_with_code_2_and_one_line(tmp_path: Path) -> None:
    """The operator starts from its command line here; all other tests fork it."""
    command = [sys.executable, "-m", "fastgen_operator.main", "--engine-image", "e", "--no-leader-elect"]
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "nothing")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("fastgen-operator: no credentials for a cluster: ")
    assert len(ended.stderr.splitlines()) == 1


PORTS = ("--metrics-port", "--health-port", "--decisions-port")


@pytest.mark.parametrize("flag", PORTS)
def test_a_port_in_use_exits_with_code_2_and_names_the_flag_to_set(unreachable: Path, flag: str) -> None:
    others = {*PORTS} - {flag}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        free = [argument for other in others for argument in (other, str(free_ports(1)[0]))]
        address = ("--no-leader-elect", "--bind-address", "127.0.0.1")
        ended = run_operator(unreachable, *address, flag, port, *free)
    words = f"{flag} {port}: Address already in use: set {flag} to a free port above 1023"
    assert ended == (2, f"fastgen-operator: {words}\n")


def test_an_address_of_another_machine_exits_with_code_2_and_names_the_flag_to_set(unreachable: Path) -> None:
    (port,) = free_ports(1)
    flags = ("--no-leader-elect", "--bind-address", "203.0.113.1", "--metrics-port", str(port))
    status, output = run_operator(unreachable, *flags)
    assert status == 2
    assert output.endswith(": set --bind-address to an address of this machine\n")


def test_outside_a_pod_leader_election_requires_a_namespace(unreachable: Path) -> None:
    status, output = run_operator(unreachable)
    assert status == 2
    assert "--lease-namespace" in output
    assert len(output.splitlines()) == 1


def test_an_operator_without_an_api_server_logs_it_retries_and_stops_on_sigterm(
    unreachable: Path, tmp_path: Path
) -> None:
    operator = OperatorProcess(unreachable, tmp_path / "log")
    operator.launch()

    def complaints() -> int:
        return operator.log.read_text().count(": reaching the API server")

    try:
        eventually(lambda: complaints() >= 2, within=30, what="two complaints")
    finally:
        assert operator.stop() == 0
    assert "Traceback" not in operator.log.read_text()


def test_only_our_children_are_watched_and_kopf_writes_nothing() -> None:
    kinds = kinds_read(Platform("engine:test"))
    settings = kopf_settings(Settings(engine_image="e", silence_seconds=12), kinds)
    assert settings.watching.inactivity_timeout == 12
    assert len(settings.watching.label_selectors) == len(kinds)
    assert set(settings.watching.label_selectors.values()) == {OWNER_LABEL}
    assert not settings.posting.enabled
    body = kopf.Body({"metadata": {"name": "a"}, "spec": {"large": [1] * 100}})
    storage = settings.persistence
    assert storage.diffbase_storage.build(body=body) == {}, "each object of each event is copied"
    assert storage.diffbase_storage.fetch(body=body) is None
