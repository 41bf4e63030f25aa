"""Command lines of the control plane programs, shared by the bare control plane and the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.families import V4, Families

ISSUER = "https://kubernetes.default.svc.cluster.local"
# With the controllers' default limit of 20 requests per second, handling a namespace or a node takes seconds.
UNHURRIED = ("--kube-api-qps=1000", "--kube-api-burst=2000")


@dataclass(frozen=True, slots=True)
class Site:
    """Files and ports of one control plane. All ports except the API server's are on 127.0.0.1."""

    programs: Path
    folder: Path
    address: str  # the API server's, as advertised to clients
    api: int
    etcd: int
    peer: int
    controllers: int
    scheduler: int
    families: Families = field(default=(V4,), kw_only=True)

    @property
    def pki(self) -> Path:
        """Folder of the certificates."""
        return self.folder / "pki"

    @property
    def server(self) -> str:
        """The API server's URL on this machine."""
        return f"https://127.0.0.1:{self.api}"


def hosts(site: Site) -> list[str]:
    """All names and addresses at which clients reach the API server."""
    service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
    services = [each.api for each in site.families]
    return list(dict.fromkeys(["localhost", *service, "127.0.0.1", site.address, *services]))


def etcd(site: Site) -> list[str | Path]:
    """Return the command of a one-member etcd. It never syncs to disk: its data need not survive a power failure."""
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
    """Return the command of the API server. `authorization`: "RBAC", or "Node,RBAC" if kubelets are clients."""
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
        f"--service-cluster-ip-range={','.join(each.services for each in site.families)}",
        "--profiling=false",
        *more,
    ]


def controller_manager(site: Site, kubeconfig: Path) -> list[str | Path]:
    """Return the command of the controller-manager. Each controller uses its own service account."""
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
    """Return the command of the scheduler."""
    return [
        site.programs / "kube-scheduler",
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={site.scheduler}",
        "--profiling=false",
        *UNHURRIED,
    ]
