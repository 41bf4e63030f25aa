"""Downloads to a small file system that is really full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.fetch.running import fetch, names
from support.hub import serving

SMALL, WEIGHTS = 4 << 20, b"w" * (3 << 20)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "volume"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_a_full_volume_is_reported_and_the_download_resumes_after_it_has_grown(volume: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "config.json").write_text("{}")
    (repository / "model-1.safetensors").write_bytes(WEIGHTS)
    (repository / "model-2.safetensors").write_bytes(WEIGHTS[::-1])
    to = volume / "one"
    with serving(repository) as hub:
        ended = fetch("hf://tests/tiny", "--to", to, HF_ENDPOINT=hub.url)
        assert ended.code == 5, ended.output
        assert "needs 6.3 MB more" in ended.last
        assert hub.served == 0
        # Other writers fill it during the download, after the check of the free space.
        subprocess.run(["mount", "-o", f"remount,size={2 * SMALL}", volume], check=True)
        hub.before_file = lambda name: _fill(volume) if name == "model-2.safetensors" else None
        ended = fetch("hf://tests/tiny", "--to", to, HF_ENDPOINT=hub.url)
        assert ended.code == 5, ended.output
        assert f"the volume of {to} is full" in ended.last
        assert "model-1.safetensors" in names(to)
        assert not (to / ".fastgen" / "complete.json").exists()
        hub.before_file = None
        (volume / "ballast").unlink()
        served = hub.served
        ended = fetch("hf://tests/tiny", "--to", to, HF_ENDPOINT=hub.url)
        assert ended.code == 0, ended.output
        assert hub.served - served <= len(WEIGHTS), "what was there came again"
        assert (to / "model-2.safetensors").read_bytes() == WEIGHTS[::-1]


def _fill(volume: Path) -> None:
    free = os.statvfs(volume)
    (volume / "ballast").write_bytes(b"x" * (free.f_bavail * free.f_bsize - (1 << 20)))
