"""Runs a real Prometheus from Debian's package against a test's targets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from cluster.commands import CommandError, run
from cluster.controlplane import free_ports
from support.waiting import eventually

SCRAPE_SECONDS = 1


def ensure_prometheus() -> Path:
    """Return the program from $PATH, or from Debian's package, unpacked into the user's cache.

    Raises CommandError if the package cannot be downloaded.
    """
    if installed := shutil.which("prometheus"):
        return Path(installed)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastgen" / "prometheus"
    program = cache / "usr" / "bin" / "prometheus"
    if not program.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            _download(Path(folder))
            (package,) = Path(folder).glob("prometheus_*.deb")
            run(["dpkg-deb", "--extract", package, Path(folder) / "files"])
            shutil.rmtree(cache, ignore_errors=True)
            (Path(folder) / "files").rename(cache)
    return program


def ensure_promtool() -> Path:
    """Return the program from $PATH, or from the same package. Raises CommandError as `ensure_prometheus`."""
    if installed := shutil.which("promtool"):
        return Path(installed)
    return ensure_prometheus().with_name("promtool")


def _download(folder: Path) -> None:
    command = ["sh", "-c", f"cd '{folder}' && apt-get download prometheus"]
    try:
        run(command)
    except CommandError:  # the package lists may be missing
        run(["apt-get", "update"])
        run(command)


@dataclass(frozen=True)
class Target:
    """A scrape target: HOST:PORT, and the labels that Kubernetes service discovery would add to its series."""

    address: str
    labels: dict[str, str] = field(default_factory=dict)
    honour: bool = False


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus. Its configuration is in `folder`."""

    url: str
    folder: Path

    def scrape(self, targets: Sequence[Target]) -> None:
        """Replace the targets. Prometheus notices it at once."""
        for honour, path in _target_files(self.folder):
            chosen = [each for each in targets if each.honour == honour]
            new = path.with_suffix(".new")
            new.write_text(json.dumps([{"targets": [each.address], "labels": each.labels} for each in chosen]))
            new.rename(path)

    def series(self, expression: str, *, seconds: float, step: float = SCRAPE_SECONDS) -> list[dict[str, Any]]:
        """Return the series of an expression over the last `seconds`, with a value per `step` seconds."""
        now = time.time()
        return self.between(expression, now - seconds, now, step)

    def between(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of an expression between two times, with a value per `step` seconds."""
        span: dict[str, str | float] = {"start": start, "end": end, "step": step}
        result: list[dict[str, Any]] = self._get("query_range", {"query": expression, **span})["result"]
        return result

    def label_values(self, selector: str, label: str) -> list[str]:
        """Return the values of a label in the series of a selector."""
        values: list[str] = self._get(f"label/{label}/values", {"match[]": selector})
        return values

    def _get(self, path: str, params: Mapping[str, str | float]) -> Any:
        answer = self._client().get(f"{self.url}/api/v1/{path}", params=dict(params)).json()
        assert answer["status"] == "success", f"{params}: {answer.get('error')}"
        return answer["data"]

    @staticmethod
    @cache
    def _client() -> httpx.Client:
        # Each new client reads the system's certificates, which takes 30 ms.
        return httpx.Client(timeout=100)


def _target_files(folder: Path) -> list[tuple[bool, Path]]:
    """Return the files of targets, with and without labels of their own to honour."""
    return [(honour, folder / f"targets-{honour}.json".lower()) for honour in (False, True)]


@contextmanager
def prometheus(folder: Path, targets: Sequence[Target] = (), *, seconds: int = SCRAPE_SECONDS) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes the targets every `seconds` seconds."""
    (port,) = free_ports(1)
    config = {
        "global": {"scrape_interval": f"{seconds}s", "scrape_timeout": f"{seconds}s"},
        "scrape_configs": [
            {
                "job_name": path.stem,
                "honor_labels": honour,
                "file_sd_configs": [{"files": [str(path)], "refresh_interval": "1s"}],
            }
            for honour, path in _target_files(folder)
        ],
    }
    source = Prometheus(f"http://127.0.0.1:{port}", folder)
    source.scrape(targets)
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        str(ensure_prometheus()),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        eventually(lambda: httpx.get(f"{source.url}/-/ready").status_code == 200, within=30, what="Prometheus")
        yield source
    finally:
        process.terminate()
        process.wait(100)
