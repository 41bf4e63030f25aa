"""Debian packages that a node and image builds need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from cluster.commands import CommandError, run

# Each package, and a program or file that shows it is installed.
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iptables": "iptables",
    "nftables": "nft",
    "conntrack": "conntrack",
    "iproute2": "ip",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}


def missing_packages() -> list[str]:
    """Return those of PACKAGES that are not installed."""
    return [package for package, sign in PACKAGES.items() if not (Path(sign).exists() or _which(sign))]


def ensure_packages(say: Callable[[str], None]) -> None:
    """Install missing packages with apt-get. Raises RuntimeError with the remedy if that is not possible."""
    if not (missing := missing_packages()):
        return
    remedy = f"install these packages: {' '.join(missing)}"
    if shutil.which("apt-get") is None:
        raise RuntimeError(f"this machine has no apt-get; {remedy}")
    if os.geteuid() != 0:
        raise RuntimeError(f"packages are missing and this user is not root; as root, {remedy}")
    say(f"installing {' '.join(missing)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(["apt-get", "update"], environment=quiet)
        run(["apt-get", "install", "-y", "--no-install-recommends", *missing], environment=quiet)
    except CommandError as error:
        raise RuntimeError(f"apt-get failed; {remedy}\n{error}") from error


def _which(program: str) -> str | None:
    # A user's PATH may lack the sbin directories.
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin")
