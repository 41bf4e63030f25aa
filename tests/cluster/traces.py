"""Removes what a node leaves on a machine besides processes: cgroups, links, packet filter rules, namespaces."""

from __future__ import annotations

import contextlib
import errno
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
    """Return the top directories of the pods' cgroups in each hierarchy."""
    return [path for path in (CGROUPS / "kubepods", *CGROUPS.glob("*/kubepods")) if path.is_dir()]


def kill_pods() -> None:
    """Kill all processes of all pods, whether or not containerd runs."""
    for top in pod_cgroups():
        # Unlike Path.rglob, os.walk ignores directories that disappear meanwhile: pods may be terminating.
        for folder, _, _ in os.walk(top):
            with contextlib.suppress(OSError):
                for pid in Path(folder, "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)


def remove_cgroups() -> None:
    """Remove the pods' cgroups, innermost first."""
    for top in pod_cgroups():
        for path, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # a process is still exiting
                Path(path).rmdir()


def kill_shims(socket: Path) -> None:
    """Kill the remaining containerd shims of this containerd socket, and remove their own sockets."""
    for pid in all_pids():
        words = command_line(pid)
        if words and "containerd-shim" in words[0] and str(socket) in words:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            shim_socket(words).unlink(missing_ok=True)


def shim_socket(words: Sequence[str], folder: Path = Path("/run/containerd/s")) -> Path:
    """Return the socket of a shim with this command line. containerd names it by a hash of three arguments."""
    address, namespace, container = (words[words.index(flag) + 1] for flag in ("-address", "-namespace", "-id"))
    return folder / hashlib.sha256(f"{address}/{namespace}/{container}".encode()).hexdigest()


def remove_networks(name: str, memory: Path = Path("/var/lib/cni/results")) -> None:
    """Remove the network namespaces of the pods in a CNI network, and the state of the CNI plugins about them.

    The plugins keep that state outside the node's folder, together with that of other networks.
    """
    for path in memory.glob(f"{name}-*"):
        try:
            remembered = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # containerd was still removing this one
        for interface in remembered["result"]["interfaces"]:
            if space := interface.get("sandbox"):
                _remove_namespace(Path(space))
        for trace in memory.glob(f"*-{remembered['containerId']}-*"):
            trace.unlink(missing_ok=True)


def _remove_namespace(path: Path) -> None:
    unmount_below(path.resolve())
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        # The first `ip netns add` of a machine covers /run/netns with a mount of itself, and so hides older mounts.
        if error.errno != errno.EBUSY:
            raise


def remove_link(name: str) -> None:
    """Remove a network link if it exists."""
    if Path("/sys/class/net", name).exists():
        run(["ip", "link", "delete", name])


def remove_rules() -> None:
    """Remove the chains and rules of Kubernetes and CNI from the packet filter, and keep all others."""
    for family in ("iptables", "ip6tables"):
        if shutil.which(f"{family}-save") is None:
            continue
        for table in TABLES:
            with contextlib.suppress(CommandError):  # the kernel has no such table
                rules = run([f"{family}-save", "--table", table])
                if any(mark in rules for mark in MARKS):
                    run([f"{family}-restore", "--table", table], stdin=without_marks(rules))


def without_marks(rules: str) -> str:
    """Return iptables-save output without the lines that name a chain of Kubernetes or CNI."""
    return "".join(line for line in rules.splitlines(keepends=True) if not any(mark in line for mark in MARKS))


def remove_log_links(folder: Path, links: Path = Path("/var/log/containers")) -> None:
    """Remove the kubelet's links to logs in the state folder."""
    if links.is_dir():
        for link in links.iterdir():
            if link.is_symlink() and Path(os.readlink(link)).is_relative_to(folder):
                link.unlink()
