"""Runs a real Prometheus from Debian's package against a test's targets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    """A running Prometheus."""

    url: str

    def series(self, expression: str, *, seconds: float) -> list[dict[str, Any]]:
        """Return the series of an expression over the last `seconds`, with a value per second."""
        now = time.time()
        span: dict[str, str | float] = {"start": now - seconds, "end": now, "step": SCRAPE_SECONDS}
        answer = httpx.get(f"{self.url}/api/v1/query_range", params={"query": expression, **span}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@contextmanager
def prometheus(folder: Path, targets: Sequence[Target]) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes the targets every second."""
    (port,) = free_ports(1)
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"},
        "scrape_configs": [
            {
                "job_name": f"job-{number}",
                "honor_labels": target.honour,
                "static_configs": [{"targets": [target.address], "labels": target.labels}],
            }
            for number, target in enumerate(targets)
        ],
    }
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
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: httpx.get(f"{url}/-/ready").status_code == 200, within=30, what="Prometheus")
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(20)
