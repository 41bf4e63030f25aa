"""The node on this machine: up starts it again after any failure, and down removes all of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import nodefiles, traces
from cluster.commands import run
from cluster.families import V4, V6
from cluster.mounts import mounted_below
from cluster.node import Node, state_folder
from cluster.packages import ensure_packages
from cluster.processes import all_pids, command_line, names_folder
from cluster.programs import ensure_programs
from cluster.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="a node needs root"),
    pytest.mark.skipif(
        state_folder().exists(), reason="a node already runs on this machine and uses the ports; run `make down` first"
    ),
]


@dataclass(frozen=True)
class Traces:
    """What a node has created on the machine."""

    processes: list[str]
    mounts: list[Path]
    links: list[str]
    namespaces: list[str]
    sockets: list[str]
    rules: list[str]
    cgroups: list[Path]
    forwarding: str


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def traces_of(folder: Path) -> Traces:
    rules = run(["iptables-save"]) + run(["ip6tables-save"])
    return Traces(
        processes=[" ".join(command_line(pid)) for pid in all_pids() if names_folder(pid, folder)],
        mounts=mounted_below(folder),
        links=sorted(re.findall(r"^\d+: ([^:@]+)", run(["ip", "-o", "link"]), re.MULTILINE)),
        namespaces=names_in(Path("/run/netns")),
        sockets=names_in(Path("/run/containerd/s")),
        rules=[line for line in rules.splitlines() if any(mark in line for mark in traces.MARKS)],
        cgroups=traces.pod_cgroups(),
        forwarding=V4.forwarding.read_text() + V6.forwarding.read_text(),
    )


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    ensure_packages(print)
    folder = Path("/var/lib/fastgen-test")
    node = Node(ensure_programs(), folder, [nodefiles.Mount(Path(__file__).parent, Path("/fastgen-test"))])
    yield node
    node.down()


@pytest.fixture(scope="module")
def bare(node: Node) -> Traces:
    """The machine before its first node."""
    found = traces_of(node.folder)
    assert found.processes == []
    return found


def test_down_removes_everything(node: Node, bare: Traces) -> None:
    node.up(print)
    assert node.is_up()
    assert traces_of(node.folder).rules != []
    node.down()
    assert traces_of(node.folder) == bare
    assert not node.folder.exists()


def test_a_second_up_changes_nothing(node: Node) -> None:
    node.up(print)
    before = node.status()
    node.up(print)
    assert node.status() == before


def test_up_restarts_programs_that_have_died(node: Node) -> None:
    node.up(print)
    killed = {name: node.status()[name] for name in ("kubelet", "kube-apiserver", "containerd")}
    for name in killed:
        node.processes.stop(name, patience=0)
    assert not node.is_up()
    node.up(print)
    assert node.is_up()
    assert all(node.status()[name] != pid for name, pid in killed.items())


def test_gpus_are_allocatable(node: Node) -> None:
    node.up(print)
    path = "-o=jsonpath={.items[0].status.allocatable.nvidia\\.com/gpu}"
    wait_for("allocatable GPUs", lambda: node.kubectl("get", "nodes", path) == "1", seconds=150, every=0.2)


def test_down_cleans_up_after_all_programs_crashed(node: Node, bare: Traces) -> None:
    node.up(print)
    for name in node.processes.names():
        node.processes.stop(name, patience=0)
    Node(node.programs, node.folder).down()
    assert traces_of(node.folder) == bare
