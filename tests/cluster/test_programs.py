"""Search order of the Kubernetes programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import programs
from cluster.programs import PROGRAMS, candidates, ensure_programs, linker_flags, missing, programs_folder


def fill(folder: Path, version: str, names: tuple[str, ...] = PROGRAMS) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\necho Kubernetes {version}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    for name, value in (("XDG_CACHE_HOME", str(tmp_path / "cache")), ("PATH", "/usr/bin:/bin")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return []


def test_kubebuilder_assets_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    assets = fill(tmp_path / "assets", "v1.2.3")
    path = fill(tmp_path / "path", f"v{programs.KUBERNETES}")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    assert ensure_programs(said.append) == assets
    assert said == []


def test_incomplete_kubebuilder_assets_are_ignored_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    assets = fill(tmp_path / "assets", "v1.34.2", ("etcd", "kube-apiserver", "kubectl"))
    path = fill(tmp_path / "path", f"v{programs.KUBERNETES}")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    assert ensure_programs(said.append) == path
    assert "kube-controller-manager" in said[0]


def test_a_folder_of_the_path_with_only_kubectl_is_ignored(tmp_path: Path) -> None:
    lone = fill(tmp_path / "path", "v1.34.2", ("kubectl",))
    assert list(candidates({"PATH": str(lone)})) == []


def test_another_release_on_the_path_is_ignored(tmp_path: Path) -> None:
    old = fill(tmp_path / "old", "v1.2.3")
    assert list(candidates({"PATH": f"{old}:/usr/bin"})) == []


def test_the_cache_avoids_a_build(tmp_path: Path, said: list[str]) -> None:
    cached = programs_folder({"XDG_CACHE_HOME": str(tmp_path / "cache")})
    fill(cached, f"v{programs.KUBERNETES}")
    assert ensure_programs(said.append) == cached
    assert said == []


def test_the_programs_folder_changes_with_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = programs_folder({"XDG_CACHE_HOME": "/c"})
    (tmp_path / "main.go").write_text("package main\n")
    monkeypatch.setattr(programs, "MODULE", tmp_path)
    after = programs_folder({"XDG_CACHE_HOME": "/c"})
    assert before.parent == after.parent == Path("/c/fastgen/kubernetes")
    assert before != after


def test_the_error_without_go_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, said: list[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="install Go"):
        ensure_programs(said.append)


def test_a_program_that_is_not_executable_is_missing(tmp_path: Path) -> None:
    folder = fill(tmp_path / "x", "v1")
    (folder / "etcd").chmod(0o644)
    assert missing(folder) == ["etcd"]


FAKE_GO = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
while [ $# -gt 0 ]; do
  case "$1" in -o) folder=$2 ;; *.) echo "listed: $1" ;; esac
  shift
done
[ -z "$folder" ] || for name in testbed pause coredns; do echo > "$folder$name"; chmod +x "$folder$name"; done
"""


def test_one_command_builds_all_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    go = tmp_path / "go" / "go"
    go.parent.mkdir()
    go.write_text(FAKE_GO)
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    assert missing(ensure_programs(said.append)) == []
    listed, built = (go.parent / "calls").read_text().splitlines()
    assert listed.split()[0] == "list"
    assert built.split()[-3:] == [".", "./pause", "./coredns"]
    assert " -gcflags=all=-dwarf=false " in built
    assert "building Kubernetes" in said[0]
    assert "built" in said[-1]


def test_the_linker_flags_set_the_versions() -> None:
    assert f"-X k8s.io/component-base/version.gitVersion=v{programs.KUBERNETES}" in linker_flags()
    assert "-X helm.sh/helm/v4/pkg/chart/common.k8sVersionMinor=34" in linker_flags()
