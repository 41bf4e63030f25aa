"""Progress bars of `fastgen generate`, which appear only on terminals."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ESCAPE = b"\x1b["


@pytest.fixture
def arguments(small_model: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The sun is\nOnce upon a time\n1, 2, 3, 4,\n")
    flags = ["--raw", "--max-tokens", "4", "--kv-cache-memory", "128MiB", "--max-model-length", "512"]
    files = ["--prompts-file", str(prompts), "--output", str(tmp_path / "answers.jsonl")]
    return [sys.executable, "-m", "fastgen", "generate", str(small_model), *files, *flags]


def shown_on_a_terminal(arguments: list[str]) -> bytes:
    """Return what the command writes to standard error on a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # how Linux reports that the last writer has closed the terminal
                break
    os.close(ours)
    assert process.returncode == 0, shown.decode(errors="replace")
    return shown


def test_a_terminal_shows_progress_of_loading_and_of_a_prompt_file(arguments: list[str], tmp_path: Path) -> None:
    shown = shown_on_a_terminal(arguments).decode()
    assert "loading weights" in shown
    assert shown.index("loading weights") < shown.index("3/3")
    assert [json.loads(line)["completion_tokens"] for line in (tmp_path / "answers.jsonl").open()] == [4, 4, 4]


def test_a_terminal_shows_progress_of_loading_from_python(small_model: Path) -> None:
    program = f"import fastgen; fastgen.pipeline({str(small_model)!r}, kv_cache_memory='128MiB', max_model_length=512)"
    assert "loading weights" in shown_on_a_terminal([sys.executable, "-c", program]).decode()


def test_output_that_is_not_a_terminal_gets_no_progress_bar(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, check=True)
    assert ESCAPE not in done.stdout + done.stderr
    assert done.stderr == b""
