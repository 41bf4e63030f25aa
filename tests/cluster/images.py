"""The project's two images, named by what went into them: only a tree that has changed is built again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from cluster.base import ensure_base
from cluster.buildah import Buildah
from cluster.commands import print_to_stderr, run

REPOSITORY = Path(__file__).resolve().parents[2]
# What .dockerignore lets through, and the two files that say what is made of it.
CONTEXT = ("LICENSE", "README.md", "engine", "operator", "pyproject.toml", "requirements")
RECIPE = ("Dockerfile", ".dockerignore")

Target = Literal["engine", "operator"]


def image_name(target: Target, build_args: Mapping[str, str], root: Path = REPOSITORY) -> str:
    """The image's full name, whose tag is a hash of everything that goes into it."""
    digest = hashlib.sha256(repr(sorted(build_args.items())).encode())
    for path in _inputs(root, (*CONTEXT, *RECIPE)):
        digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"docker.io/library/fastgen-{target}:{digest.hexdigest()[:16]}"


def build(
    target: Target, build_args: Mapping[str, str] | None = None, say: Callable[[str], None] = print_to_stderr
) -> str:
    """Builds a target with buildah unless its store has it, and returns the image's name.

    Raises CommandError, whose text is the build's output, where it fails.
    """
    args = dict(build_args or {})
    buildah = Buildah.of_user()
    name = image_name(target, args)
    if not buildah.has(name):
        base = ensure_base(buildah, say)
        say(f"building {name}")
        buildah.build(REPOSITORY, target, name, {**args, "BASE": base})
        # An engine holds gigabytes; what the new image shares with its forerunners stays.
        buildah.remove(other for other in buildah.names() if is_forerunner(other, target, name))
    return name


def build_with_docker(target: Target, build_args: Mapping[str, str], say: Callable[[str], None]) -> str:
    """Builds a target with docker, on the real base image, and returns the image's name."""
    name = image_name(target, build_args)
    say(f"building {name}")
    settings = [f"--build-arg={key}={value}" for key, value in build_args.items()]
    run(["docker", "build", f"--target={target}", f"--tag={name}", *settings, REPOSITORY], timeout=3600)
    return name


def is_forerunner(other: str, target: Target, name: str) -> bool:
    """Whether `other` was made of the same target as the image `name`, out of another state of the tree."""
    return other.startswith(f"docker.io/library/fastgen-{target}:") and other != name and not other.endswith(":host")


@contextmanager
def saved(name: str) -> Iterator[Path]:
    """The image as a docker-archive, in a file that is there for as long as the context is."""
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
