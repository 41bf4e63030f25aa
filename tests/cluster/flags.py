"""The command lines of the control plane's programs, as values: shared by the control plane alone and the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
ISSUER = "https://kubernetes.default.svc.cluster.local"
# The controllers' own limit of 20 requests a second makes a namespace or a node take seconds to be seen to.
UNHURRIED = ("--kube-api-qps=1000", "--kube-api-burst=2000")


@dataclass(frozen=True, slots=True)
class Site:
    """Where one control plane keeps its files and listens. Every port is on 127.0.0.1 but the API server's."""

    programs: Path
    folder: Path
    address: str  # the API server's, as told to clients
    api: int
    etcd: int
    peer: int
    controllers: int
    scheduler: int

    @property
    def pki(self) -> Path:
        """The folder of the certificates."""
        return self.folder / "pki"

    @property
    def server(self) -> str:
        """The API server's URL on this machine."""
        return f"https://127.0.0.1:{self.api}"


def hosts(site: Site) -> list[str]:
    """Every name and address under which clients ask for the API server."""
    service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
    return list(dict.fromkeys(["localhost", *service, "127.0.0.1", site.address, API_SERVICE]))


def etcd(site: Site) -> list[str | Path]:
    """An etcd of one member. Nothing it holds has to outlive the machine's power, so it never waits for the disk."""
    client, peer = f"http://127.0.0.1:{site.etcd}", f"http://127.0.0.1:{site.peer}"
    return [
        site.programs / "etcd",
        "--name=bed",
        f"--data-dir={site.folder / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=bed={peer}",
        "--log-level=warn",
        f"--quota-backend-bytes={4 << 30}",
    ]


def api_server(site: Site, *, authorization: str, more: Sequence[str] = ()) -> list[str | Path]:
    """The API server. `authorization` is its list of modes: "RBAC", or "Node,RBAC" where kubelets are clients."""
    pki = site.pki
    return [
        site.programs / "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{site.etcd}",
        f"--secure-port={site.api}",
        f"--advertise-address={site.address}",
        f"--authorization-mode={authorization}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={pki / 'tokens.key'}",
        f"--service-account-signing-key-file={pki / 'tokens.key'}",
        f"--service-cluster-ip-range={SERVICES}",
        "--profiling=false",
        *more,
    ]


def controller_manager(site: Site, kubeconfig: Path) -> list[str | Path]:
    """The controllers, each with the permissions of its own service account."""
    pki = site.pki
    return [
        site.programs / "kube-controller-manager",
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={site.controllers}",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki / 'tokens.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
        "--profiling=false",
        *UNHURRIED,
    ]


def scheduler(site: Site, kubeconfig: Path) -> list[str | Path]:
    """The scheduler."""
    return [
        site.programs / "kube-scheduler",
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={site.scheduler}",
        "--profiling=false",
        *UNHURRIED,
    ]
