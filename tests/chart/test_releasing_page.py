"""The page on releasing: its commands run, with stand-ins for Docker and a registry, and what it names exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pytest
import yaml

from chart_files.files import ROOT, texts
from cluster import release
from fastgen_operator import kinds
from harness.chart import CHART, CRD_CHART, Helm
from support.manifests import load_all
from support.pages import blocks

PAGE = "docs/releasing.md"
TEXT = (ROOT / PAGE).read_text()
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
IMAGES, CHARTS, MANIFEST = (text for place, text in blocks("sh") if place.startswith(f"{PAGE}:"))
# Why a command is not run here, by its first words.
NOT_RUN = ("git tag --sign", "docker buildx build", "cosign sign")


@contextmanager
def registry() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the address of a registry that takes everything, and the manifests that it was given, by path."""
    manifests: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, status: int, body: bytes = b"", length: int = 0) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(length or len(body)))
            self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
            self.send_header("Location", f"{self.path}upload")
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            found = manifests.get(self.path)
            self.reply(404 if found is None else 200, length=len(found or b""))

        def do_GET(self) -> None:
            found = manifests.get(self.path)
            self.reply(404 if found is None else 200, found or b"")

        def do_POST(self) -> None:
            self.reply(202)

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if "/manifests/" in self.path:
                manifests[self.path] = body
            self.reply(201)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", manifests
    finally:
        server.shutdown()
        server.server_close()


def run(script: str, folder: Path, **environment: str) -> None:
    """Run a script until its first error. Fails with what it wrote."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_place_of_the_version_is_named(helm: Helm) -> None:
    named = {
        str(path.relative_to(ROOT))
        for pattern in re.findall(
            r"`((?:charts|docs|operator|pyproject)[\w/*.-]+\.\w+)`", TEXT.partition("\n## Steps")[0]
        )
        for path in ROOT.glob(pattern)
    }
    generated = {str(path.relative_to(ROOT)) for path, text in texts(helm.program).items() if VERSION in text}
    assert all(f"`{path}`" in TEXT for path in generated)
    pages = [ROOT / "README.md", ROOT / "install.yaml", *(ROOT / "docs").rglob("*.md")]
    found: dict[str, set[str]] = {}
    for path in (*pages, *(ROOT / "charts").rglob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")):
        if versions := set(re.findall(r"fastgen-(?:engine|operator|gateway):(\d[\w.-]*)", path.read_text())):
            found[str(path.relative_to(ROOT))] = versions
    assert found.keys() <= named | generated
    assert all(versions == {VERSION} for versions in found.values()), found
    assert {path for path in named if path.startswith("docs/")} <= found.keys()
    assert "`VERSION` in `operator/fastgen_operator/kinds.py`" in TEXT
    assert f'VERSION: Final = "{kinds.VERSION}"' in (ROOT / "operator/fastgen_operator/kinds.py").read_text()


def test_the_changelog_has_the_headings_of_the_first_step() -> None:
    assert f"Rename `## Unreleased` in `CHANGELOG.md` to `## {VERSION} (YYYY-MM-DD)`" in TEXT
    first, *others = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == "Unreleased"
    released = [re.fullmatch(r"(\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)", heading) for heading in others]
    assert all(released), others


def test_the_tag_is_one_that_the_upgrade_test_takes() -> None:
    assert f"`git tag --sign v{VERSION}`" in TEXT
    assert "`PREVIOUS` in `tests/cluster/release.py`" in TEXT
    assert re.fullmatch(r"[0-9a-f]{40}|v\d+\.\d+\.\d+", release.PREVIOUS)


def test_images_are_built_from_targets_and_arguments_that_the_dockerfile_has(tmp_path: Path) -> None:
    recipe = (ROOT / "Dockerfile").read_text()
    recorder = tmp_path / "docker"
    recorder.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    recorder.chmod(0o755)
    run(IMAGES, ROOT, PATH=f"{tmp_path}:{os.environ['PATH']}")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3
    for call, target in zip(calls, ("engine", "operator", "gateway"), strict=True):
        assert f" --target {target} " in call
        assert re.search(rf"^FROM \S+ AS {target}$", recipe, re.MULTILINE)
        assert f" --tag REGISTRY/fastgen-{target}:{VERSION} " in call
        (base,) = re.findall(r" --build-arg BASE=(\S+)@sha256:DIGEST ", call)
        assert f"\nARG BASE={base}\n" in recipe


@pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")
def test_charts_are_packaged_signed_and_pushed(helm: Helm, tmp_path: Path) -> None:
    for chart in (CHART, CRD_CHART):
        shutil.copytree(chart, tmp_path / "charts" / chart.name)
    key = "gpg --batch --quiet --passphrase '' --quick-generate-key 'release <release@example.com>' ed25519 sign never"
    # The agent's socket needs a short path.
    with TemporaryDirectory() as keys, registry() as (address, manifests):
        environment = {
            **{"GNUPGHOME": keys, "PATH": f"{helm.program.parent}:{os.environ['PATH']}"},
            **{"HELM_CONFIG_HOME": str(tmp_path), "HELM_CACHE_HOME": str(tmp_path)},
        }
        script = CHARTS.replace("REGISTRY/charts", f"{address}/charts --plain-http")
        try:
            run(f"{key}\n{script}", tmp_path, **environment)
        finally:
            run("gpgconf --kill all", tmp_path, **environment)
    charts = {chart.name: yaml.safe_load((chart / "Chart.yaml").read_text()) for chart in (CHART, CRD_CHART)}
    packages = {f"{name}-{chart['version']}.tgz" for name, chart in charts.items()}
    assert {path.name for path in tmp_path.glob("fastgen*")} == packages | {f"{name}.prov" for name in packages}
    pushed = {path: body for path, body in manifests.items() if "sha256:" not in path}
    assert pushed.keys() == {f"/v2/charts/{name}/manifests/{chart['version']}" for name, chart in charts.items()}
    assert all(b"helm.chart.provenance" in body for body in pushed.values())
    assert not list(tmp_path.glob("secring*"))


def test_the_published_manifest_names_both_images_by_digest(tmp_path: Path) -> None:
    shutil.copy(ROOT / "install.yaml", tmp_path)
    run(MANIFEST.replace("sha256:DIGEST", DIGEST), tmp_path)
    objects = load_all((tmp_path / "install.yaml").read_text())
    (deployment,) = [obj for obj in objects if obj["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"REGISTRY/fastgen-operator@{DIGEST}"
    assert f"--engine-image=REGISTRY/fastgen-engine@{DIGEST}" in container["args"]


def test_the_page_says_which_of_its_commands_were_not_run() -> None:
    last = " ".join(TEXT.partition("\n## Not done by this repository\n")[2].split())
    (said,) = re.findall(r"- ((?:`[\w -]+`(?:, | and )?)+) were not run", last)
    assert tuple(re.findall(r"`(.+?)`", said)) == NOT_RUN
    run_here = ("gpg --export-secret-keys", "helm package", "helm push", "rm ", "sed ", "for ", "done", "make ")
    inline = re.findall(r"`((?:git|cosign|docker|helm|make) [^`]+)`", TEXT.partition("\n## Not")[0])
    lines = "\n".join((IMAGES, CHARTS, MANIFEST)).replace("\\\n", " ").splitlines()
    printed = [*inline, *(line.strip() for line in lines if line)]
    assert {words for words in NOT_RUN for text in printed if text.startswith(words)} == set(NOT_RUN)
    assert [text for text in printed if not text.startswith((*NOT_RUN, *run_here))] == []
