"""buildah with a store of its own, so that it meets no other images of this machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster import mounts
from cluster.commands import CommandError, run

BUILD_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Buildah:
    """A store of images in a folder, and the ways to add to it."""

    folder: Path

    @classmethod
    def of_user(cls) -> Buildah:
        """The store in the user's cache folder."""
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "fastgen" / "images"
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def run(self, *args: str) -> str:
        """Runs one command of buildah and returns its stdout. Raises CommandError."""
        store = [f"--root={self.folder / 'root'}", f"--runroot={self.folder / 'run'}", "--storage-driver=overlay"]
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # what is unmounted below may be in use by another one's build
            try:
                return run(["buildah", *store, *args], timeout=BUILD_SECONDS)
            finally:
                # The overlay driver leaves its folder mounted on itself.
                mounts.unmount_below(self.folder)

    def has(self, name: str) -> bool:
        """Whether the store has the image."""
        try:
            self.run("inspect", "--type=image", name)
        except CommandError:
            return False
        return True

    def names(self) -> list[str]:
        """The names of all images in the store."""
        return self.run("images", "--noheading", "--filter=dangling=false", "--format={{.Name}}:{{.Tag}}").split()

    def remove(self, names: Iterable[str]) -> None:
        """Removes images, and with them the layers that no other image has."""
        for name in names:
            self.run("rmi", name)

    def build(self, context: Path, target: str, name: str, arguments: Mapping[str, str]) -> None:
        """Builds a target of the context's Dockerfile. Nothing is pulled: the base has to be in the store."""
        settings = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        shape = ["--layers", "--force-rm", "--pull-never", "--network=host", "--format=docker"]
        self.run("bud", *shape, f"--target={target}", f"--tag={name}", *settings, str(context))

    def save(self, name: str, path: Path) -> None:
        """Writes the image to a docker-archive."""
        path.unlink(missing_ok=True)
        self.run("push", "--quiet", name, f"docker-archive:{path}:{name}")
