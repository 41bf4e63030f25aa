"""Image archives written without docker."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cluster.archive import Image, write


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_bytes(b"\x7fELF")
    path.chmod(0o755)
    return path


def unpacked(path: Path) -> tuple[dict[str, Any], tarfile.TarFile]:
    with tarfile.open(path) as tar:
        contents = {member.name: tar.extractfile(member) for member in tar}
        files = {name: stream.read() for name, stream in contents.items() if stream}
    (manifest,) = json.loads(files["manifest.json"])
    config = json.loads(files[manifest["Config"]])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(files['layer.tar']).hexdigest()}"]
    return {**config["config"], "names": manifest["RepoTags"]}, tarfile.open(fileobj=io.BytesIO(files["layer.tar"]))


def test_an_archive_contains_name_entrypoint_environment_and_user(tmp_path: Path) -> None:
    image = Image("fastgen:1", ["/a", "b"], environment={"A": "1"}, user="65532:65532")
    write(image, tmp_path / "image.tar")
    config, _ = unpacked(tmp_path / "image.tar")
    assert config["names"] == ["fastgen:1"]
    assert config["Entrypoint"] == ["/a", "b"]
    assert config["Env"] == ["A=1"]
    assert config["User"] == "65532:65532"


def test_a_layer_contains_files_with_modes_and_links_with_targets(tmp_path: Path, program: Path) -> None:
    files: dict[str, bytes | Path] = {"/opt/bin/program": program, "/etc/passwd": b"root:x:0:0::/:\n"}
    write(Image("x:1", ["/x"], files=files, links={"/lib": "/host/lib"}), tmp_path / "image.tar")
    _, layer = unpacked(tmp_path / "image.tar")
    assert layer.getmember("opt/bin/program").mode == 0o755
    assert layer.getmember("etc/passwd").mode == 0o644
    assert layer.getmember("lib").linkname == "/host/lib"


def test_parent_directories_precede_their_contents(tmp_path: Path, program: Path) -> None:
    image = Image("x:1", ["/x"], files={"/a/b/c": program}, folders={"/tmp": 0o1777})
    write(image, tmp_path / "image.tar")
    _, layer = unpacked(tmp_path / "image.tar")
    assert layer.getnames() == ["a", "a/b", "tmp", "a/b/c"]
    assert layer.getmember("tmp").mode == 0o1777


def test_archives_are_deterministic(tmp_path: Path, program: Path) -> None:
    for name in ("one", "two"):
        write(Image("x:1", ["/x"], files={"/a": program}), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
