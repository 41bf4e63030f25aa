"""A substitute for the image python:3.11-slim-bookworm, built from Debian packages if no registry is reachable.

The Dockerfile uses it through its argument BASE. What this machine needs to reach its package registries (trusted
certificate authorities, pip's configuration) is in the substitute, which stays in the local store, and never in the
Dockerfile.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.buildah import Buildah
from cluster.commands import run

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv", "python-is-python3")
# Python's C headers, which the image has without those of the C library.
HEADERS = "libpython3.11-dev"
ADD_HEADERS = (
    f"cd /tmp; apt-get update; apt-get download {HEADERS}\n"
    f"dpkg-deb --fsys-tarfile {HEADERS}_*.deb | tar --extract --directory / ./usr/include; "
    f"rm {HEADERS}_*.deb; apt-get clean"
)
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
PIP_CONFIGURATION = Path("/etc/pip.conf")
# Package sources, if set in this machine's environment.
PASSED_ON = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX")
# Not read by anything in a container.
LEFT_OUT = ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")


def ensure_base(buildah: Buildah, say: Callable[[str], None]) -> str:
    """Return the substitute's name in buildah's store. Building it the first time takes a minute or two."""
    name = base_name(os.environ)
    if buildah.has(name):
        return name
    say("building a substitute for the image python:3.11-slim-bookworm from Debian packages (once)")
    with tempfile.TemporaryDirectory(prefix="base-", dir=buildah.folder) as work:
        root = Path(work) / "root"
        run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, root, *_mirror()])
        run(["chroot", root, "sh", "-ec", ADD_HEADERS])
        _trim(root)
        shutil.copy(AUTHORITIES, root / "etc/ssl/certs/ca-certificates.crt")
        if PIP_CONFIGURATION.exists():
            shutil.copy(PIP_CONFIGURATION, root / "etc/pip.conf")
        container = buildah.run("from", "scratch").strip()
        try:
            buildah.run("add", "--quiet", container, str(root), "/")
            settings = [f"--env={key}={value}" for key, value in _environment(os.environ).items()]
            buildah.run("config", "--cmd=python3", *settings, container)
            buildah.run("commit", "--quiet", container, name)
        finally:
            buildah.run("rm", container)
    return name


def base_name(environment: Mapping[str, str]) -> str:
    """Return a name that changes with every input of the substitute."""
    digest = hashlib.sha256(repr((SUITE, PACKAGES, ADD_HEADERS, LEFT_OUT, _environment(environment))).encode())
    for path in (AUTHORITIES, PIP_CONFIGURATION):
        digest.update(path.read_bytes() if path.exists() else b"")
    return f"localhost/fastgen-base:{digest.hexdigest()[:12]}"


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin",
        "LANG": "C.UTF-8",
        # pip and uv each bundle their own certificate authorities.
        "PIP_CERT": str(AUTHORITIES),
        "SSL_CERT_FILE": str(AUTHORITIES),
        **{name: environment[name] for name in PASSED_ON if name in environment},
    }


def _mirror() -> list[str]:
    """Return the Debian mirror that apt uses on this machine, if any; debootstrap has a default."""
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    if not sources.exists():
        return []
    lines = sources.read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith("URIs:")][:1]


def _trim(root: Path) -> None:
    for folder in LEFT_OUT:
        shutil.rmtree(root / folder, ignore_errors=True)
        (root / folder).mkdir(parents=True)
    for mark in (root / "usr/lib").glob("python3*/EXTERNALLY-MANAGED"):
        mark.unlink()
