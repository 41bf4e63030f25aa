"""Models from a hub: downloaded files, rejected sources, and the cost of a broken connection."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.fetch.running import fetch, fetch_each, marker, names, start
from support.hub import COMMIT, TOKEN, Hub, serving
from support.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow  # together over ten seconds

WEIGHTS = bytes(range(256)) * 20_000  # five megabytes


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    (folder / "onnx").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "empty.json").write_text("")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights once more")
    (folder / "pytorch_model.bin").write_bytes(b"and once more")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "onnx" / "model.json").write_text("{}")
    (folder / "tiny.Q4.gguf").write_bytes(b"GGUF" + WEIGHTS[:1000])
    with serving(folder) as running:
        yield running


def test_files_needed_for_serving_are_downloaded_and_the_commit_is_recorded(hub: Hub, tmp_path: Path) -> None:
    to = tmp_path / "models" / "one"
    ended = fetch("hf://tests/tiny", "--to", to, HF_ENDPOINT=hub.url)
    assert ended.code == 0, ended.output
    assert names(to) == ["config.json", "empty.json", "model.safetensors", "tokenizer.json"]
    assert (to / "model.safetensors").read_bytes() == WEIGHTS
    found = marker(to)
    assert (found["source"], found["revision"], found["version"]) == ("hf://tests/tiny", "main", COMMIT)
    assert found["files"] == {name: (to / name).stat().st_size for name in names(to)}


def test_a_complete_folder_needs_no_request_to_the_hub(hub: Hub, tmp_path: Path) -> None:
    to = tmp_path / "one"
    assert fetch("hf://tests/tiny", "--to", to, HF_ENDPOINT=hub.url).code == 0
    ended = fetch("hf://tests/tiny", "--to", to, HF_ENDPOINT="http://127.0.0.1:1")
    assert ended.code == 0
    assert ended.last.endswith("is complete")


def test_a_source_can_name_one_gguf_file(hub: Hub, tmp_path: Path) -> None:
    ended = fetch("hf://tests/tiny/tiny.Q4.gguf", "--to", tmp_path / "one", HF_ENDPOINT=hub.url)
    assert ended.code == 0, ended.output
    assert names(tmp_path / "one") == ["tiny.Q4.gguf"]


def test_a_broken_connection_is_resumed_at_the_next_byte(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after = [2_000_000, 4_000_000]
    ended = fetch("hf://tests/tiny", "--to", tmp_path / "one", HF_ENDPOINT=hub.url)
    assert ended.code == 0, ended.output
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == WEIGHTS
    assert sum("trying again" in line for line in ended.output.splitlines()) == 2
    sizes = [(tmp_path / "one" / name).stat().st_size for name in names(tmp_path / "one")]
    assert hub.served == sum(sizes), "bytes came twice"


def test_the_next_process_resumes_after_a_kill(hub: Hub, tmp_path: Path) -> None:
    to = tmp_path / "one"
    hub.cut_after, hub.fails_after_cuts = [3_000_000], True
    process = start("hf://tests/tiny", "--to", to, HF_ENDPOINT=hub.url)
    assert process.stderr is not None
    lines = iter(process.stderr)
    assert any("trying again" in line for line in lines), "it was not cut"
    process.kill()
    process.communicate()
    hub.failures = []
    assert "model.safetensors" not in names(to), "a file that is not whole has its name"
    assert not (to / ".fastgen" / "complete.json").exists()
    ended = fetch("hf://tests/tiny", "--to", to, HF_ENDPOINT=hub.url)
    assert ended.code == 0, ended.output
    assert (to / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.served < 1.2 * len(WEIGHTS), "the next process began again"


def test_a_server_without_range_support_works(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    hub.cut_after = [2_000_000]
    ended = fetch("hf://tests/tiny", "--to", tmp_path / "one", HF_ENDPOINT=hub.url)
    assert ended.code == 0, ended.output
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == WEIGHTS


def test_a_busy_hub_is_retried(hub: Hub, tmp_path: Path) -> None:
    hub.failures = [503, 429]
    ended = fetch("hf://tests/tiny/tiny.Q4.gguf", "--to", tmp_path / "one", HF_ENDPOINT=hub.url)
    assert ended.code == 0, ended.output


def test_new_content_of_the_same_name_replaces_a_partial_file(hub: Hub, tmp_path: Path) -> None:
    to = tmp_path / "one"
    assert fetch("hf://tests/tiny", "--to", to, HF_ENDPOINT=hub.url).code == 0
    (to / ".fastgen" / "complete.json").unlink()
    (hub.folder / "model.safetensors").write_bytes(WEIGHTS[::-1])
    (hub.folder / "tokenizer.json").unlink()
    hub.served = 0
    assert fetch("hf://tests/tiny", "--to", to, HF_ENDPOINT=hub.url).code == 0
    assert (to / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert names(to) == ["config.json", "empty.json", "model.safetensors"]
    assert hub.served == len(WEIGHTS), "what had not changed was fetched again"


REFUSED: list[tuple[list[str], int, str]] = [
    (["hf://tests/none"], 3, "no such repository that may be read without HF_TOKEN"),
    (["hf://tests/tiny", "--revision", "gone"], 3, "revision gone: no such revision"),
    (["hf://tests/tiny/other.gguf"], 3, "has no file other.gguf"),
    (["hf://tests/gated"], 4, "gated: accept its terms"),
    (["tests/tiny"], 2, "give hf://owner/name"),
]


def test_each_failure_has_its_exit_code_and_a_one_line_error(hub: Hub, tmp_path: Path) -> None:
    commands = [[*arguments, "--to", str(tmp_path / "one")] for arguments, *_ in REFUSED]
    for (arguments, code, words), ended in zip(REFUSED, fetch_each(commands, HF_ENDPOINT=hub.url), strict=True):
        assert (ended.code, ended.last.startswith("fastgen: error: ")) == (code, True), (arguments, ended.output)
        assert words in ended.last


def test_an_unknown_token_is_rejected(hub: Hub, tmp_path: Path) -> None:
    ended = fetch("hf://tests/tiny", "--to", tmp_path / "one", HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
    assert ended.code == 4
    assert "Invalid credentials" in ended.last


def test_a_gated_model_is_downloaded_with_a_token(hub: Hub, tmp_path: Path) -> None:
    assert fetch("hf://tests/gated", "--to", tmp_path / "one", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN).code == 0


def test_a_repository_of_gguf_files_requires_a_file_name(hub: Hub, tmp_path: Path) -> None:
    for name in ("model.safetensors", "consolidated.safetensors"):
        (hub.folder / name).unlink()
    ended = fetch("hf://tests/tiny", "--to", tmp_path / "one", HF_ENDPOINT=hub.url)
    assert ended.code == 3
    assert "name one of them, for example hf://tests/tiny/tiny.Q4.gguf" in ended.last


def test_sigterm_ends_the_download(hub: Hub, tmp_path: Path) -> None:
    hub.failures = [503] * 100
    process = start("hf://tests/tiny", "--to", tmp_path / "one", HF_ENDPOINT=hub.url)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM


def test_unused_models_are_evicted(hub: Hub, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("old", "previous"):
        assert fetch("hf://tests/tiny/tiny.Q4.gguf", "--to", models / name, HF_ENDPOINT=hub.url).code == 0
    (models / "lost+found").mkdir()
    ended = fetch("hf://tests/tiny", "--to", models / "new", "--keep", "previous", HF_ENDPOINT=hub.url)
    assert ended.code == 0, ended.output
    assert sorted(entry.name for entry in models.iterdir()) == ["lost+found", "new", "previous"]
