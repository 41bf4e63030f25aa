"""The project's three images. Their tags are hashes of their inputs, so only a changed tree is rebuilt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.base import ensure_base
from cluster.buildah import Buildah
from cluster.commands import print_to_stderr, run

REPOSITORY = Path(__file__).resolve().parents[2]
# What .dockerignore includes, and the two files that define the build.
CONTEXT = ("LICENSE", "README.md", "engine", "gateway", "operator", "pyproject.toml", "requirements")
RECIPE = ("Dockerfile", ".dockerignore")

Target = Literal["engine", "gateway", "operator"]


@dataclass(frozen=True, slots=True)
class Tree:
    """A source tree, and what the tags of its images begin with. A new build replaces older ones with its prefix."""

    root: Path
    prefix: str = ""


PRESENT = Tree(REPOSITORY)


def image_name(target: Target, build_args: Mapping[str, str], tree: Tree = PRESENT) -> str:
    """Return the image's full name. Its tag is a hash of all inputs of the build."""
    digest = hashlib.sha256(repr(sorted(build_args.items())).encode())
    for path in _inputs(tree.root, (*CONTEXT, *RECIPE)):
        digest.update(f"\0{path.relative_to(tree.root)}\0".encode() + path.read_bytes())
    return f"docker.io/library/fastgen-{target}:{tree.prefix}{digest.hexdigest()[:16]}"


def build(
    target: Target,
    build_args: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print_to_stderr,
    tree: Tree = PRESENT,
) -> str:
    """Build a target with buildah unless its store has the image, and return the image's name.

    Raises CommandError with the build's output if the build fails.
    """
    args = dict(build_args or {})
    buildah = Buildah.of_user()
    name = image_name(target, args, tree)
    if not buildah.has(name):
        base = ensure_base(buildah, say)
        say(f"building {name}")
        buildah.build(tree.root, target, name, {**args, "BASE": base})
        # An engine image has gigabytes. Layers shared with the new image are kept.
        buildah.remove(other for other in buildah.names() if is_older_build(other, name))
    return name


def build_with_docker(
    target: Target, build_args: Mapping[str, str], say: Callable[[str], None], tree: Tree = PRESENT
) -> str:
    """Build a target with docker, on the real base image, and return the image's name."""
    name = image_name(target, build_args, tree)
    say(f"building {name}")
    settings = [f"--build-arg={key}={value}" for key, value in build_args.items()]
    run(["docker", "build", f"--target={target}", f"--tag={name}", *settings, tree.root], timeout=3600)
    return name


def is_older_build(other: str, name: str) -> bool:
    """Return whether `other` is a build of the same target as `name` from another state of the same tree."""
    return _series(other) == _series(name) and other != name and not other.endswith(":host")


def _series(name: str) -> tuple[str, str]:
    """Return what two builds of one target and tree have in common: the repository and the tag's prefix."""
    repository, _, tag = name.rpartition(":")
    return repository, tag.rpartition("-")[0]


@contextmanager
def saved(name: str) -> Iterator[Path]:
    """Yield the image as a docker-archive file, which is deleted at the end of the context."""
    buildah = Buildah.of_user()
    path = buildah.folder / f"{name.replace('/', '-').replace(':', '-')}.tar"
    try:
        buildah.save(name, path)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _inputs(root: Path, names: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for name in names:
        path = root / name
        files += [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sorted(p for p in files if "__pycache__" not in p.parts and p.suffix != ".pyc")
