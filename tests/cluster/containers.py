"""The node's containerd, spoken to by its own command-line client."""

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
    """The containers and images behind one socket, in the namespace that the kubelet uses."""

    socket: Path

    def answers(self) -> bool:
        """Whether containerd is there to talk to."""
        try:
            self._ctr(["version"])
        except (CommandError, subprocess.TimeoutExpired):
            return False
        return True

    def images(self) -> list[str]:
        """The names of the images that pods can be made of."""
        return self._ctr(["images", "ls", "-q"]).split()

    def load(self, archive: Path) -> None:
        """Imports a docker-archive; its image takes the place of one of the same name."""
        self._ctr(["images", "import", "--snapshotter=overlayfs", str(archive)], timeout=IMPORT_SECONDS)

    def remove_images(self, names: Iterable[str]) -> None:
        """Forgets images; containers that were made of them run on."""
        for name in names:
            self._ctr(["images", "rm", name])

    def ids(self) -> list[str]:
        """Every container, the pods' sandboxes among them."""
        return self._ctr(["containers", "ls", "-q"]).split()

    def remove(self, ids: Sequence[str]) -> None:
        """Ends and forgets containers, so that each one's shim ends by itself and takes its socket along."""
        for container in ids:
            for command in (["tasks", "rm", "--force", container], ["containers", "rm", container]):
                with contextlib.suppress(CommandError, subprocess.TimeoutExpired):
                    self._ctr(command)

    def _ctr(self, args: Sequence[str], timeout: float = 30.0) -> str:
        return run(["ctr", f"--address={self.socket}", "--namespace=k8s.io", *args], timeout=timeout)


def default_spec() -> str:
    """The runtime specification that containerd gives a container by default, as JSON."""
    return run(["ctr", "oci", "spec"])
