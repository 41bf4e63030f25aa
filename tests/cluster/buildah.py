"""buildah with its own store, isolated from other images on this machine."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster import mounts
from cluster.caches import cache_folder
from cluster.commands import CommandError, run

BUILD_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Buildah:
    """An image store in a folder."""

    folder: Path

    @classmethod
    def of_user(cls) -> Buildah:
        """Return the store in the user's cache directory."""
        folder = cache_folder("images")
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def run(self, *args: str) -> str:
        """Run a buildah command and return its stdout. Raises CommandError."""
        store = [f"--root={self.folder / 'root'}", f"--runroot={self.folder / 'run'}", "--storage-driver=overlay"]
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another build may be using what is unmounted below
            try:
                return run(["buildah", *store, *args], timeout=BUILD_SECONDS)
            finally:
                # The overlay driver leaves its folder bind-mounted on itself.
                mounts.unmount_below(self.folder)

    def has(self, name: str) -> bool:
        """Return whether the store has the image."""
        try:
            self.run("inspect", "--type=image", name)
        except CommandError:
            return False
        return True

    def names(self) -> list[str]:
        """Return the names of all images in the store."""
        return self.run("images", "--noheading", "--filter=dangling=false", "--format={{.Name}}:{{.Tag}}").split()

    def remove(self, names: Iterable[str]) -> None:
        """Remove images, and the layers that no other image uses."""
        for name in names:
            self.run("rmi", "--force", name)  # an interrupted build may have left a container of it

    def build(self, context: Path, target: str, name: str, arguments: Mapping[str, str]) -> None:
        """Build a target of the context's Dockerfile. Nothing is pulled: the base image must be in the store."""
        settings = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        shape = ["--layers", "--force-rm", "--pull-never", "--network=host", "--format=docker"]
        self.run("bud", *shape, f"--target={target}", f"--tag={name}", *settings, str(context))

    def save(self, name: str, path: Path) -> None:
        """Write the image to a docker-archive."""
        path.unlink(missing_ok=True)
        self.run("push", "--quiet", name, f"docker-archive:{path}:{name}")
