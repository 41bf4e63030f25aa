"""Client of the node's containerd, through ctr."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.commands import CommandError, run

IMPORT_SECONDS = 1200.0


@dataclass(frozen=True, slots=True)
class Containers:
    """Containers and images of one containerd, in the kubelet's namespace."""

    socket: Path

    def answers(self) -> bool:
        """Return whether containerd responds."""
        try:
            self._ctr(["version"])
        except (CommandError, subprocess.TimeoutExpired):
            return False
        return True

    def images(self) -> list[str]:
        """Return the names of the loaded images."""
        return self._ctr(["images", "ls", "-q"]).split()

    def load(self, archive: Path) -> None:
        """Import a docker-archive. It replaces an image of the same name."""
        self._ctr(["images", "import", "--snapshotter=overlayfs", str(archive)], timeout=IMPORT_SECONDS)

    def remove_images(self, names: Iterable[str]) -> None:
        """Remove images. Running containers keep theirs."""
        for name in names:
            self._ctr(["images", "rm", name])

    def ids(self) -> list[str]:
        """Return the ids of all containers, pod sandboxes included."""
        return self._ctr(["containers", "ls", "-q"]).split()

    def remove(self, ids: Sequence[str]) -> None:
        """Kill and remove containers. Their shims then exit and remove their sockets."""
        for container in ids:
            for command in (["tasks", "rm", "--force", container], ["containers", "rm", container]):
                with contextlib.suppress(CommandError, subprocess.TimeoutExpired):
                    self._ctr(command)

    def _ctr(self, args: Sequence[str], timeout: float = 180.0) -> str:
        return run(["ctr", f"--address={self.socket}", "--namespace=k8s.io", *args], timeout=timeout)


def default_spec() -> str:
    """Return containerd's default runtime specification of a container as JSON."""
    return run(["ctr", "oci", "spec"])
