"""Command line: a user error gives one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from fastgen import __version__
from fastgen.commands import main
from fastgen.settings import ENGINE_SETTINGS, SERVER_SETTINGS
from support.demo_weights import demo_model
from support.waiting import HANG_SECONDS, PATIENCE, eventually


def run(*arguments: str) -> tuple[int, str]:
    """Run the command in a separate process; return the exit code and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "fastgen", *arguments], capture_output=True, text=True, timeout=240 * PATIENCE
    )
    return done.returncode, done.stderr


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command in this process, assert that it fails with a one-line error, and return that line."""
    capsys.readouterr()  # output before the command: writing a GGUF file logs
    try:
        code = main.main(arguments)
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("fastgen: error: ")
    return line


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"fastgen {__version__}\n"


def test_help_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    shown = capsys.readouterr().out
    for setting in (*ENGINE_SETTINGS, *SERVER_SETTINGS):
        assert setting.flag in shown
    assert "(default: 1024)" in shown


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--token-budget", "0"], "--token-budget 0: must be at least 1"),
        (["--token-budget", "lots"], "argument --token-budget: invalid auto or int value: 'lots'"),
        (["--block-size", "48"], "--block-size 48: must be a power of two"),
        (["--kv-cache-memory", "2 apples"], "write a whole number with a unit, for example 2GiB"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--max-sequences", "64", "--token-budget", "16"], "must be at most --token-budget 16"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--token", "16"], "unrecognized arguments: --token"),
    ],
)
def test_an_invalid_flag_gives_a_one_line_error(
    capsys: pytest.CaptureFixture[str], command: str, flags: list[str], said: str
) -> None:
    prompt = ["a prompt"] if command == "generate" else []
    assert said in refuse(capsys, command, "model.gguf", *prompt, *flags)


@pytest.mark.parametrize("flags", [["\udcff.gguf"], ["model.gguf", "--served-model-name", "a", "\udcff"]])
def test_a_name_that_is_not_utf8_gives_a_one_line_error(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    """Neither responses nor messages to the engine could hold it."""
    assert "in UTF-8" in refuse(capsys, "serve", *flags)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0", "--api-processes 0: must be at least 1"),
        ("65", "--api-processes 65: must be at most 64"),
        ("two", "argument --api-processes: invalid int value: 'two'"),
    ],
)
def test_an_invalid_number_of_api_processes_gives_a_one_line_error(
    capsys: pytest.CaptureFixture[str], value: str, said: str
) -> None:
    assert said in refuse(capsys, "serve", "model.gguf", "--api-processes", value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--top-p", "2"], "top_p is 2.0"),
    ],
)
def test_an_invalid_sampling_parameter_gives_a_one_line_error(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert said in refuse(capsys, "generate", "model.gguf", "a prompt", *flags)


@pytest.mark.parametrize("arguments", [[], ["serve"], ["generate", "model.gguf"], ["sing", "model.gguf"]])
def test_an_incomplete_command_gives_a_one_line_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert refuse(capsys, *arguments)


@pytest.mark.parametrize("command", ["serve", "generate"])
class TestModels:
    def refuse(self, capsys: pytest.CaptureFixture[str], command: str, model: Path) -> str:
        return refuse(capsys, command, str(model), *(["a prompt"] if command == "generate" else []))

    def test_a_missing_path_gives_a_one_line_error(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
    ) -> None:
        assert "no such file or directory" in self.refuse(capsys, command, tmp_path / "nothing.gguf")

    def test_a_file_that_is_not_a_model_gives_a_one_line_error(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
    ) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("not a model at all, but long enough to have a header")
        assert str(path) in self.refuse(capsys, command, path)

    def test_an_unknown_architecture_gives_a_one_line_error(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
        assert "bert" in self.refuse(capsys, command, tmp_path).lower()
        path = tmp_path / "mamba.gguf"
        writer = gguf.GGUFWriter(path, "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert "mamba" in self.refuse(capsys, command, path)


def test_a_port_in_use_gives_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refuse(capsys, "serve", str(demo_model()), "--host", "127.0.0.1", "--port", port)
    assert f"--port {port}: Address already in use; choose another" in line


@pytest.mark.parametrize(("flag", "value"), [("--port", "65536"), ("--host", "nowhere.invalid")])
def test_an_invalid_address_gives_a_one_line_error(capsys: pytest.CaptureFixture[str], flag: str, value: str) -> None:
    assert f"{flag} {value}" in refuse(capsys, "serve", str(demo_model()), flag, value)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_context_larger_than_the_cache_gives_a_one_line_error(command: str, small_model: Path) -> None:
    flags = ["--kv-cache-memory", "1MiB", "--max-model-length", "8192"]
    rest = ["--host", "127.0.0.1", "--port", "0"] if command == "serve" else ["a prompt"]
    code, said = run(command, str(small_model), *rest, *flags)
    assert code == 2
    lines = said.splitlines()
    assert lines[-1].startswith("fastgen: error: --max-model-length 8192")
    assert sum("error" in line.lower() for line in lines) == 1
    assert "Traceback" not in said


def test_a_closed_output_pipe_ends_the_command_without_an_error() -> None:
    program = """
import sys
from fastgen.commands import main
def talk(options):
    while True:
        print("more")
main._parser = lambda arguments: main._Parser()
main._Parser.parse_args = lambda self, arguments: main.argparse.Namespace(command=talk)
sys.exit(main.main([]))
"""
    talker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert talker.stdout is not None
    assert talker.stderr is not None
    assert talker.stdout.readline() == b"more\n"
    talker.stdout.close()
    assert talker.stderr.read() == b""
    assert talker.wait() == 1


def test_importing_fastgen_or_the_server_does_not_import_torch() -> None:
    program = """
import sys
import fastgen, fastgen.server.main, fastgen.commands.main
heavy = {"torch", "numba", "llvmlite", "transformers"} & set(sys.modules)
assert not heavy, heavy
from fastgen import LLM, Grammar, SamplingParams, client, pipeline, serve
assert LLM.__module__ == "fastgen.llm.llm"
assert callable(fastgen.serve), "the function, not a module of that name"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        (["--version"], {"numpy", "prometheus_client"}),
        (["serve", "--help"], {"numpy", "importlib.metadata", "fastgen.server"}),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: list[str], unused: set[str]) -> None:
    """`serve` starts the engine process after these imports."""
    program = """
import sys
from fastgen.commands import main
try:
    main.main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
print(*sys.modules, sep="\\n", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fastgen" in done.stdout
    assert not (unused | {"torch", "numba", "transformers", "rich"}) & set(done.stderr.split())


def test_an_unknown_name_raises_attribute_error() -> None:
    import fastgen

    with pytest.raises(AttributeError, match="no attribute 'Pipeline'"):
        fastgen.Pipeline  # noqa: B018


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_sigterm_ends_process_1_of_a_container_while_it_imports_its_modules() -> None:
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "fastgen", "serve", "/nonexistent"]
    with subprocess.Popen(words) as outer:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")

        def handler() -> int | None:
            """Return the process once it handles SIGTERM."""
            for process in children.read_text().split():
                handled = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
                if handled and int(handled[1], 16) >> signal.SIGTERM - 1 & 1:
                    return int(process)
            return None

        process = eventually(handler, within=20, what="a handler of SIGTERM", every=0.01)
        os.kill(process, signal.SIGTERM)
        assert outer.wait(HANG_SECONDS) == 128 + signal.SIGTERM
