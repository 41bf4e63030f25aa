"""Writes small container images as docker-archive files, which containerd, docker and kind can load."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Image:
    """An image with one layer.

    `files` maps absolute paths in the image to their contents (bytes, or a file on this machine), `links` maps symbolic
    links to their targets, and `folders` maps empty directories to their modes. Parent directories are added.
    """

    name: str
    entrypoint: Sequence[str]
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""


def write(image: Image, path: Path) -> None:
    """Write the image to `path`. The output is deterministic, so the digest changes only with the image."""
    layer = _layer(image)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {
                "Entrypoint": list(image.entrypoint),
                "Env": [f"{name}={value}" for name, value in image.environment.items()],
                "User": image.user,
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
            "history": [{"created_by": "fastgen test bed"}],
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": name, "RepoTags": [image.name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(path, "w") as tar:
        for member, data in ((name, config), ("layer.tar", layer), ("manifest.json", manifest)):
            _add_file(tar, member, data, 0o644)


def _layer(image: Image) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder, mode in _folders(image).items():
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, mode
            tar.addfile(member)
        for target, content in sorted(image.files.items()):
            mode = content.stat().st_mode & 0o777 if isinstance(content, Path) else 0o644
            data = content.read_bytes() if isinstance(content, Path) else content
            _add_file(tar, target.lstrip("/"), data, mode)
        for target, to in sorted(image.links.items()):
            member = tarfile.TarInfo(target.lstrip("/"))
            member.type, member.linkname = tarfile.SYMTYPE, to
            tar.addfile(member)
    return buffer.getvalue()


def _folders(image: Image) -> dict[str, int]:
    """Return all directories of the image with their modes, parents first."""
    folders = {folder.lstrip("/"): mode for folder, mode in image.folders.items()}
    for target in (*image.files, *image.links, *image.folders):
        for parent in PurePosixPath(target.lstrip("/")).parents:
            if str(parent) != ".":
                folders.setdefault(str(parent), 0o755)
    return dict(sorted(folders.items()))


def _add_file(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))
