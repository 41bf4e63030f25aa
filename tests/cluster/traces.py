"""What a node leaves on a machine beyond its processes: cgroups, links, packet rules, namespaces; and its removal."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from cluster.commands import CommandError, run
from cluster.mounts import unmount_below
from cluster.processes import all_pids, command_line

CGROUPS = Path("/sys/fs/cgroup")
MARKS = ("KUBE-", "CNI-")
TABLES = ("nat", "filter", "mangle", "raw")


def pod_cgroups() -> list[Path]:
    """The topmost folders of the pods' cgroups, in each hierarchy."""
    return [path for path in (CGROUPS / "kubepods", *CGROUPS.glob("*/kubepods")) if path.is_dir()]


def kill_pods() -> None:
    """Kills every process of every pod, whether or not containerd is there to do it."""
    for top in pod_cgroups():
        # Unlike Path.rglob, os.walk passes over folders that go while it walks: pods may be on their way out.
        for folder, _, _ in os.walk(top):
            with contextlib.suppress(OSError):
                for pid in Path(folder, "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)


def remove_cgroups() -> None:
    """Removes the pods' cgroups, the innermost first."""
    for top in pod_cgroups():
        for path, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # a process that is still ending
                Path(path).rmdir()


def kill_shims(socket: Path) -> None:
    """Kills the containers' parents that were started for this socket and are left over, and removes their sockets."""
    for pid in all_pids():
        words = command_line(pid)
        if words and "containerd-shim" in words[0] and str(socket) in words:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            shim_socket(words).unlink(missing_ok=True)


def shim_socket(words: Sequence[str], folder: Path = Path("/run/containerd/s")) -> Path:
    """The socket of a container's parent with this command line: containerd names it by a hash of three arguments."""
    address, namespace, container = (words[words.index(flag) + 1] for flag in ("-address", "-namespace", "-id"))
    return folder / hashlib.sha256(f"{address}/{namespace}/{container}".encode()).hexdigest()


def remove_networks(name: str, memory: Path = Path("/var/lib/cni/results")) -> None:
    """Removes the network namespaces of the pods in a CNI network, and what the CNI programs remember of them.

    They remember it beside other networks' and outside the node's folder, so it is there even after a crash.
    """
    for path in memory.glob(f"{name}-*"):
        try:
            remembered = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # containerd was still taking this one down
        for interface in remembered["result"]["interfaces"]:
            if space := interface.get("sandbox"):
                unmount_below(Path(space).resolve())
                Path(space).unlink(missing_ok=True)
        for trace in memory.glob(f"*-{remembered['containerId']}-*"):
            trace.unlink(missing_ok=True)


def remove_link(name: str) -> None:
    """Removes a network link, if it is there."""
    if Path("/sys/class/net", name).exists():
        run(["ip", "link", "delete", name])


def remove_rules() -> None:
    """Takes Kubernetes's and CNI's chains and rules out of the packet filter, and leaves all others."""
    for family in ("iptables", "ip6tables"):
        if shutil.which(f"{family}-save") is None:
            continue
        for table in TABLES:
            with contextlib.suppress(CommandError):  # a kernel without this table has no rules in it
                rules = run([f"{family}-save", "--table", table])
                if any(mark in rules for mark in MARKS):
                    run([f"{family}-restore", "--table", table], stdin=without_marks(rules))


def without_marks(rules: str) -> str:
    """The text of iptables-save without the lines that name a chain of Kubernetes or CNI."""
    return "".join(line for line in rules.splitlines(keepends=True) if not any(mark in line for mark in MARKS))


def remove_log_links(folder: Path, links: Path = Path("/var/log/containers")) -> None:
    """Removes the kubelet's links to logs in the state folder."""
    if links.is_dir():
        for link in links.iterdir():
            if link.is_symlink() and Path(os.readlink(link)).is_relative_to(folder):
                link.unlink()
