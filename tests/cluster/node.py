"""One-node Kubernetes on this machine without docker: control plane, containerd, kubelet, kube-proxy and DNS.

It uses the default ports, so a machine can have only one. Everything it creates is in its state folder or is undone by
down(). GPUs are advertised as an extended resource: the scheduler counts them, but there is no device.
`cluster.gpus` lets engines simulate one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster import dns, flags, nodefiles, traces
from cluster.archive import Image, write
from cluster.commands import CommandError, run
from cluster.containers import Containers, default_spec
from cluster.controlplane import stop_all, wait_until_healthy
from cluster.families import V4, V6, Families
from cluster.mounts import unmount_below
from cluster.pki import Authority, write_token_key
from cluster.processes import Processes, all_pids, command_line, names_folder
from cluster.waiting import wait_for

DEFAULT_FOLDER = Path("/var/lib/fastgen-bed")
# One, so that a second pod waits for it: a pod asks for one GPU at most.
GPUS = 1
PROGRAMS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "containerd",
    "kubelet",
    "kube-proxy",
)
# The path of a unix socket has at most 107 bytes. containerd and the kubelet create theirs below this folder.
LONGEST_FOLDER = 60
BRIDGE_RULES = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")

Say = Callable[[str], None]


def state_folder() -> Path:
    """Return the state folder: $FASTGEN_BED_FOLDER if set, DEFAULT_FOLDER otherwise."""
    return Path(os.environ.get("FASTGEN_BED_FOLDER") or DEFAULT_FOLDER)


class Node:
    """The node of one state folder. Every container gets `mounts` read-only.

    With `images`, containerd keeps its images in that folder when the node is removed. The first of `families` is the
    cluster's own.
    """

    def __init__(
        self,
        programs: Path,
        folder: Path,
        mounts: Sequence[nodefiles.Mount] = (),
        images: Path | None = None,
        families: Families = (V4,),
    ) -> None:
        if len(str(folder)) > LONGEST_FOLDER:
            raise ValueError(f"state folder {folder}: longer than {LONGEST_FOLDER} characters; set FASTGEN_BED_FOLDER")
        self.programs = programs
        self.folder = folder
        self.mounts = mounts
        self.families = families
        self.images = images or folder / "containerd" / "root"
        self.name = socket.gethostname().lower()
        self.processes = Processes(folder)
        self.containers = Containers(folder / "containerd.sock")
        self.kubeconfig = folder / "admin.kubeconfig"

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """Run kubectl as the administrator and return its stdout. Raises CommandError."""
        return run([self.programs / "kubectl", f"--kubeconfig={self.kubeconfig}", *args], stdin=stdin)

    def status(self) -> dict[str, int | None]:
        """Return the process id of each of PROGRAMS; None if it does not run."""
        return {name: self.processes.pid(name) for name in PROGRAMS}

    def is_up(self) -> bool:
        """Return whether all programs run."""
        return all(pid is not None for pid in self.status().values())

    def up(self, say: Say) -> None:
        """Start what does not run, and wait until pods can run and resolve each other's names.

        Raises RuntimeError if the machine does not support a node or a program fails, TimeoutError if one is not
        healthy in time.
        """
        require_root()
        with _alone(self.folder):
            address = self.families[0].own_address()
            changed = self._changed_files(address)
            if changed and self.processes.names():
                say("the node's settings have changed: restarting it")
                self._down()
                changed = self._changed_files(address)
            if other := [pid for pid in all_pids() if _is_kubelet(pid) and not names_folder(pid, self.folder)]:
                remedy = "stop it, or name its cluster in FASTGEN_KUBECONFIG"
                raise RuntimeError(f"another kubelet runs on this machine (process {other[0]}): {remedy}")
            site = flags.Site(
                self.programs, self.folder, address, 6443, 2379, 2380, 10257, 10259, families=self.families
            )
            is_new = not (self.folder / "done").exists()
            if is_new:
                self._write_identities(site)
            for path, text in changed.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            self._allow_forwarding()
            self._start_control_plane(site)
            self._start_containers()
            if is_new:
                self.containers.remove(self.containers.ids())  # of a node that crashed, whose images were kept
            wait_until_healthy(self.processes, "kube-apiserver", site.api, "/readyz")
            say("API server ready")
            self._start_node(site, say)

    def down(self) -> None:
        """Stop all processes and undo everything that up() did, whatever state an earlier run left behind."""
        require_root()
        with _alone(self.folder):
            self._down()

    def load(self, archive: Path) -> None:
        """Load the image of a docker-archive into containerd."""
        self.containers.load(archive)

    def _files(self, address: str) -> dict[Path, str]:
        folder, pki = self.folder, self.folder / "pki"
        return {
            folder / "address": address,
            folder / "containerd.toml": nodefiles.containerd(folder, self.images),
            folder / "base-spec.json": nodefiles.base_spec(default_spec(), self.mounts),
            folder / "cni" / "10-bridge.conflist": nodefiles.network(folder, self.families),
            folder / "kubelet.yaml": nodefiles.kubelet(folder, pki, self.families),
            folder / "proxy.yaml": nodefiles.proxy(folder, self.name, self.families),
        }

    def _changed_files(self, address: str) -> dict[Path, str]:
        files = self._files(address).items()
        return {path: text for path, text in files if not path.exists() or path.read_text() != text}

    def _write_identities(self, site: flags.Site) -> None:
        site.folder.mkdir(parents=True, exist_ok=True)
        site.folder.chmod(0o711)
        authority = Authority.open(site.pki)
        authority.issue("apiserver", "kube-apiserver", hosts=flags.hosts(site))
        authority.issue("kubelet-client", "kube-apiserver-kubelet-client", ["system:masters"])
        node = f"system:node:{self.name}"
        authority.issue("kubelet", node, ["system:nodes"], [self.name, "localhost", "127.0.0.1", site.address])
        write_token_key(site.pki / "tokens.key")
        for name, user, groups in (
            ("admin", "admin", ["system:masters"]),
            ("controller-manager", "system:kube-controller-manager", []),
            ("scheduler", "system:kube-scheduler", []),
            ("kubelet-api", node, ["system:nodes"]),
            ("proxy", "system:kube-proxy", []),
        ):
            authority.kubeconfig(site.folder / f"{name}.kubeconfig", site.server, user, groups)
        (site.folder / "done").touch()

    def _allow_forwarding(self) -> None:
        for family in self.families:
            before = self.folder / f"forwarding{family.flag}"
            if not before.exists():
                before.write_text(family.forwarding.read_text())
            family.forwarding.write_text("1")
        if BRIDGE_RULES.exists():
            # Without this a pod cannot reach a pod on the same bridge through a Service.
            BRIDGE_RULES.write_text("1")

    def _start_control_plane(self, site: flags.Site) -> None:
        with_kubelets = nodefiles.api_server_flags(site.pki, self.families)
        self.processes.start("etcd", flags.etcd(site))
        self.processes.start("kube-apiserver", flags.api_server(site, authorization="Node,RBAC", more=with_kubelets))

    def _start_containers(self) -> None:
        self.processes.start("containerd", ["containerd", f"--config={self.folder}/containerd.toml"])
        wait_for("containerd answers", self.containers.answers, seconds=180)
        for name, program in ((nodefiles.PAUSE_IMAGE, "pause"), (dns.IMAGE, "coredns")):
            if name not in self.containers.images():
                target = f"/{program}"
                with tempfile.TemporaryDirectory() as work:
                    archive = Path(work) / "image.tar"
                    write(Image(name, [target], {target: self.programs / program}), archive)
                    self.containers.load(archive)

    def _start_node(self, site: flags.Site, say: Say) -> None:
        folder, start = self.folder, self.processes.start
        start("kube-controller-manager", flags.controller_manager(site, folder / "controller-manager.kubeconfig"))
        start("kube-scheduler", flags.scheduler(site, folder / "scheduler.kubeconfig"))
        kubelet: list[str | Path] = [
            self.programs / "kubelet",
            f"--config={folder}/kubelet.yaml",
            f"--kubeconfig={folder}/kubelet-api.kubeconfig",
            f"--root-dir={folder}/kubelet",
            f"--cert-dir={folder}/kubelet/pki",
            f"--hostname-override={self.name}",
            f"--node-ip={','.join(each.own_address() for each in self.families)}",
        ]
        start("kubelet", kubelet)
        start("kube-proxy", [self.programs / "kube-proxy", f"--config={folder}/proxy.yaml"])
        self.kubectl("apply", "-f", "-", stdin=dns.manifests(self.families[0].dns))
        wait_for(
            f"the node is Ready (see {self.processes.log('kubelet')})", self._node_is_ready, seconds=180, every=0.1
        )
        say("node ready")
        gpus = json.dumps({"status": {"capacity": {"nvidia.com/gpu": str(GPUS)}}})
        self.kubectl("patch", "node", self.name, "--subresource=status", "--type=merge", f"--patch={gpus}")
        self.kubectl("-n", dns.SPACE, "rollout", "status", f"deployment/{dns.NAME}", "--timeout=600s")
        say("cluster DNS ready")

    def _node_is_ready(self) -> bool:
        self.processes.check()
        path = '{.status.conditions[?(@.type=="Ready")].status}'
        try:
            return self.kubectl("get", "node", self.name, f"-o=jsonpath={path}") == "True"
        except CommandError:
            return False

    def _down(self) -> None:
        if not self.folder.exists():
            return
        stop = self.processes.stop
        stop("kubelet", patience=5)  # first, since it would start the pods again
        ids: list[str] = []
        if self.processes.pid("containerd") is not None:
            with contextlib.suppress(CommandError):
                ids = self.containers.ids()
        traces.kill_pods()
        self.containers.remove(ids)
        stop("kube-proxy", patience=5)
        stop_all(self.processes)
        traces.kill_shims(self.containers.socket)
        stop("containerd", patience=5)
        unmount_below(self.folder)
        traces.remove_networks(nodefiles.BRIDGE)
        traces.remove_link(nodefiles.BRIDGE)
        traces.remove_rules()
        traces.remove_cgroups()
        traces.remove_log_links(self.folder)
        for family in (V4, V6):
            if (before := self.folder / f"forwarding{family.flag}").exists():
                family.forwarding.write_text(before.read_text())
        shutil.rmtree(self.folder)


def require_root() -> None:
    """Raise PermissionError unless this process runs as root."""
    if os.geteuid() != 0:
        raise PermissionError("a native node needs root; run as root, or name another cluster in FASTGEN_KUBECONFIG")


def own_address() -> str:
    """Return the IPv4 address at which pods can reach this machine. Raises RuntimeError if there is none."""
    return V4.own_address()


def _is_kubelet(pid: int) -> bool:
    return any(Path(word).name == "kubelet" for word in command_line(pid)[:1])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock that other processes need to start or stop the same node."""
    with Path(tempfile.gettempdir(), f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
