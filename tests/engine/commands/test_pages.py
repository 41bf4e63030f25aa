"""The documentation's commands for fastgen and its Python, run as they are printed, with a small model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fastgen.commands import main
from support.pages import blocks, commands

pytestmark = pytest.mark.slow

# Why a command is not run here, by a pattern of the command.
NOT_RUN = {
    r"fastgen serve .*": "tests/engine/server serves models",
    r"fastgen (bench|top) (http://\S+|URL)( .*)?": "tests/engine/commands/test_bench_and_top.py runs it with a server",
    r"fastgen top fgd/NAME": "tests/operator/plugin runs it",
    r"fastgen calibrate .*": "tests/engine/llm/test_llm.py measures a curve",
    r"fastgen verify .*": "tests/engine/commands/test_verify.py runs it",
    r"fastgen fetch hf://.*": "tests/engine/fetch downloads from a hub of its own",
}
# Arguments that keep a command short, by its first word.
SHORTER = {
    "generate": ["--max-tokens", "4"],
    "bench": ["--requests", "4", "--prompt-tokens", "16", "--generation-tokens", "4"],
}
DEMO = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOT_RUN_PYTHON = {
    "fastgen.serve(": "tests/engine/mii serves",
    "fastgen.client(": "tests/engine/mii serves",
    "client.embeddings": "needs a server of an embedding model",
}


def reason_not_run(command: str) -> str | None:
    """Return the pattern in `NOT_RUN` that matches a command, if any."""
    return next((pattern for pattern in NOT_RUN if re.fullmatch(pattern, command)), None)


def test_each_reason_not_to_run_a_command_applies_to_one() -> None:
    assert {reason_not_run(command) for _, command in commands("fastgen")} - {None} == set(NOT_RUN)
    for part in NOT_RUN_PYTHON:
        assert any(part in text for _, text in blocks("python"))


def test_the_arguments_of_commands_that_are_not_run_are_accepted() -> None:
    past = "docs/decisions/"
    found = [text for place, text in commands("fastgen") if reason_not_run(text) and not place.startswith(past)]
    used = {main._parser(words).parse_args(words).command.__module__ for words in (text.split()[1:] for text in found)}
    assert len(used) == 6


def test_the_commands_for_fastgen_succeed(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.txt").write_text("What is the capital of Germany?\nAnd of France?\n")
    run = dict.fromkeys(command for _, command in commands("fastgen") if reason_not_run(command) is None)
    for command in run:
        _, name, *arguments = [str(small_model) if word == "MODEL" else word for word in shlex.split(command)]
        words = [name, *arguments, *SHORTER[name], "--kv-cache-memory", "16MiB"]
        assert main.main(words) == 0, f"{command}\n{capsys.readouterr().err}"
    assert {command.split()[1] for command in run} == set(SHORTER)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


def test_the_python_runs(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of one page run in one namespace."""
    namespaces: dict[str, dict[str, Any]] = {}
    for place, text in blocks("python"):
        if not any(part in text for part in NOT_RUN_PYTHON):
            assert text.count(DEMO) + text.count("llm.generate") > 0, place
            shorter = text.replace(f'"{DEMO}"', f'"{small_model}", kv_cache_memory=1 << 24').replace("2048", "128")
            exec(compile(shorter, place, "exec"), namespaces.setdefault(place.partition(":")[0], {}))
    assert len(namespaces) == 3
    assert re.search(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", capsys.readouterr().out)
