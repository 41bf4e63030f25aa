"""A bare Kubernetes control plane (etcd, API server, controller-manager) for tests that run no pods."""

from __future__ import annotations

import fcntl
import functools
import itertools
import json
import os
import random
import shutil
import socket
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from cluster import flags
from cluster.commands import run
from cluster.pki import Authority, write_token_key
from cluster.processes import Processes, command_line
from cluster.waiting import wait_for

PREFIX = "fastgen-plane-"
# Clients stop first: the API server waits for them, and etcd must outlive the API server.
STOPPED_IN_ORDER = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")
ATTEMPTS = 3
_FIRST_PORT, _PORTS = 10_000, 20_000
_ports = itertools.count(random.randrange(_PORTS))


class ControlPlane:
    """A control plane on free ports of 127.0.0.1, in a temporary folder. Several can run at the same time.

    Use it as a context manager, or call start() and stop(). There are no nodes: a Deployment gets its ReplicaSet and
    pods, and the pods stay Pending. With `scheduler=True` pods are assigned to nodes that a test creates. `gates` are
    feature gates of the API server that are off by default.
    """

    def __init__(self, programs: Path, *, scheduler: bool = False, gates: Sequence[str] = ()) -> None:
        self.programs = programs
        self.scheduler = scheduler
        self.gates = gates
        self._site: flags.Site | None = None
        self._processes: Processes | None = None

    @property
    def site(self) -> flags.Site:
        """Files and ports of the control plane. Raises RuntimeError before start()."""
        if self._site is None:
            raise RuntimeError("the control plane is not started: use it as a context manager, or call start()")
        return self._site

    @property
    def folder(self) -> Path:
        """The temporary folder; `logs/` contains a file per program."""
        return self.site.folder

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "admin.kubeconfig"

    def start(self) -> None:
        """Start the programs and wait until all of them are healthy.

        Raises RuntimeError with the end of a program's log if it does not start, TimeoutError if it is not healthy
        within a minute. Then all programs are stopped, and the folder is kept for its logs.
        """
        remove_abandoned(Path(tempfile.gettempdir()))
        for attempt in range(1, ATTEMPTS + 1):
            folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            (folder / "owner").write_text(str(os.getpid()))
            self._site = flags.Site(self.programs, folder, "127.0.0.1", *free_ports(5))
            processes = self._processes = Processes(folder)
            try:
                self._start(processes)
            except RuntimeError as error:
                stop_all(processes)
                # Another process may take a port between its choice and its use.
                if "address already in use" not in str(error) or attempt == ATTEMPTS:
                    raise
                shutil.rmtree(folder)
            except BaseException:
                stop_all(processes)
                raise
            else:
                return

    def stop(self) -> None:
        """Stop all programs and remove the folder. Does nothing if nothing was started."""
        if self._processes is not None:
            stop_all(self._processes)
            shutil.rmtree(self.folder, ignore_errors=True)
            self._site = self._processes = None

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """Run kubectl as the administrator and return its stdout. Raises CommandError, which includes its stderr."""
        return run([self.programs / "kubectl", f"--kubeconfig={self.kubeconfig}", *args], stdin=stdin)

    def wait_for_crds(self, *names: str) -> None:
        """Wait until the API server serves the kinds of these CRDs.

        `kubectl wait`, and a path of kubectl over the conditions, fail for a CRD that has no conditions yet.
        """

        def is_served(name: str) -> bool:
            status = json.loads(self.kubectl("get", "crd", name, "--output=json")).get("status", {})
            conditions = status.get("conditions") or ()
            return any((each["type"], each["status"]) == ("Established", "True") for each in conditions)

        wait_for(f"the CRDs {', '.join(names)}", lambda: all(map(is_served, names)), seconds=180)

    def kubeconfig_for(self, name: str, user: str, groups: Sequence[str] = ()) -> Path:
        """Return a kubeconfig in the folder with a client certificate of the user. Its rights come from RBAC."""
        authority = Authority.open(self.folder / "pki")
        return authority.kubeconfig(self.folder / f"{name}.kubeconfig", self.site.server, user, groups)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, processes: Processes) -> None:
        site = self.site
        authority = Authority.open(site.pki)
        authority.issue("apiserver", "kube-apiserver", hosts=flags.hosts(site))
        write_token_key(site.pki / "tokens.key")
        authority.kubeconfig(self.kubeconfig, site.server, "admin", ["system:masters"])
        gates = [f"--feature-gates={','.join(f'{gate}=true' for gate in self.gates)}"] if self.gates else []
        alone = ["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none", *gates]
        processes.start("etcd", flags.etcd(site))
        processes.start("kube-apiserver", flags.api_server(site, authorization="RBAC", more=alone))
        wait_until_healthy(processes, "kube-apiserver", site.api, "/readyz")
        client = self.kubeconfig_for("controller-manager", "system:kube-controller-manager")
        processes.start("kube-controller-manager", flags.controller_manager(site, client))
        if self.scheduler:
            client = self.kubeconfig_for("scheduler", "system:kube-scheduler")
            processes.start("kube-scheduler", flags.scheduler(site, client))
            wait_until_healthy(processes, "kube-scheduler", site.scheduler, "/healthz")
        wait_until_healthy(processes, "kube-controller-manager", site.controllers, "/healthz")


def wait_until_healthy(processes: Processes, name: str, port: int, path: str) -> None:
    """Wait until the program's health check succeeds.

    Raises RuntimeError if any of the programs exits meanwhile, TimeoutError after a minute.
    """

    def healthy() -> bool:
        processes.check()
        return answers(f"https://127.0.0.1:{port}{path}")

    wait_for(f"{name} answers {path} (its log: {processes.log(name)})", healthy, seconds=180)


def stop_all(processes: Processes) -> None:
    """Stop the programs of a control plane, clients before servers."""
    for name in STOPPED_IN_ORDER:
        processes.stop(name, patience=3)


def answers(url: str) -> bool:
    """Return whether a server responds with 200. Its certificate is not verified."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, context=context, timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 without a listener at this moment, which no other call returns soon.

    They are below the range from which outgoing connections take theirs: a program that starts with such a port, or
    starts again, may otherwise find it in use. A program takes a while to listen, so the next call must not return its
    port: the ports of one process follow each other, and no other process of this user has them while it runs.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = _FIRST_PORT + next(_ports) % _PORTS
        with suppress(OSError):  # another process has it, or something listens there
            fcntl.lockf(_reserved(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


@functools.cache
def _reserved() -> BinaryIO:
    """Open the file in which the byte of a port is locked: by a process, not by its forks, and until it ends."""
    return (Path(tempfile.gettempdir()) / f"fastgen-test-ports-{os.getuid()}").open("ab")


def remove_abandoned(folder: Path) -> None:
    """Stop the control planes in `folder` whose owner was killed."""
    for state in folder.glob(f"{PREFIX}*"):
        try:
            owner = int((state / "owner").read_text())
        except (OSError, ValueError):
            continue  # being created or removed at this moment
        if not command_line(owner):
            stop_all(Processes(state))
            shutil.rmtree(state, ignore_errors=True)
