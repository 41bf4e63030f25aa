"""Models on a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.model.hub import hub_repository
from support.hub import COMMIT, TOKEN, Hub, serving

pytestmark = pytest.mark.slow  # each starts a process or two

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
# Run in a separate process, because huggingface_hub reads its environment on import.
OPEN = """
import sys
from fastgen.model import ModelError
from fastgen.model.source import ModelSource
for model in sys.argv[1:]:
    try:
        source = ModelSource.open(model)
        print(source.path, source.architecture.vocab_size)
    except ModelError as error:
        print(error)
assert not {"torch", "transformers"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("repository")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "modeling_tiny.py").write_text("raise SystemExit('code of a repository was run')")
    (folder / "pytorch_model.bin").write_bytes(b"weights once more")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.json").write_text("{}")
    with serving(folder) as running:
        yield running


def open_models(endpoint: str, home: Path, *models: str, **more: str) -> list[str]:
    """Open each model and return its path and vocabulary size, or the error."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*", **more}
    done = subprocess.run([sys.executable, "-c", OPEN, *models], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_is_downloaded_once_without_code_and_then_served_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    (opened,) = open_models(hub.url, tmp_path, "tests/tiny")
    path, vocabulary = opened.split()
    assert vocabulary == "64"
    assert Path(path).is_relative_to(tmp_path)
    assert sorted(file.name for file in Path(path).iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    fetched = hub.downloads.copy()
    assert open_models(hub.url, tmp_path, "tests/tiny", f"tests/tiny@{COMMIT}") == [opened, opened]
    assert hub.downloads == fetched
    assert open_models(hub.url, tmp_path, "tests/tiny", HF_HUB_OFFLINE="1") == [opened]
    assert open_models("http://127.0.0.1:9", tmp_path, "tests/tiny") == [opened]


def test_hub_errors_are_one_line_with_the_remedy(hub: Hub, tmp_path: Path) -> None:
    nothing, gated, revision = open_models(hub.url, tmp_path, "tests/nothing", "tests/gated", "tests/tiny@gone")
    assert "no such file or directory, and no model at" in nothing
    assert "set HF_TOKEN" in nothing
    assert f"gated: accept its terms at {hub.url}/tests/gated and set HF_TOKEN" in gated
    assert "has no such revision of tests/tiny" in revision
    (invalid,) = open_models(hub.url, tmp_path, "tests/a--b")
    assert "tests/a--b: not a valid name of a model on a hub: " in invalid
    (offline,) = open_models(hub.url, tmp_path, "tests/tiny", HF_HUB_OFFLINE="1")
    assert "not cached, and HF_HUB_OFFLINE is set" in offline
    (unreachable,) = open_models("http://127.0.0.1:9", tmp_path, "tests/tiny")
    assert "not cached, and http://127.0.0.1:9 cannot be reached" in unreachable


def test_a_token_gives_access_to_a_gated_model(hub: Hub, tmp_path: Path) -> None:
    (opened,) = open_models(hub.url, tmp_path, "tests/gated", HF_TOKEN=TOKEN)
    assert opened.endswith(" 64")


@pytest.mark.parametrize(
    ("model", "repository"),
    [
        ("organisation/name", "organisation/name"),
        ("organisation/name.v2@refs/pr/3", "organisation/name.v2"),
        ("name", None),
        ("./folder", None),
        ("/a/b", None),
        ("a/b/c.gguf", None),
        ("../x/y", None),
    ],
)
def test_only_two_names_with_a_slash_are_a_hub_repository(model: str, repository: str | None) -> None:
    assert hub_repository(model) == repository


def test_an_existing_path_is_not_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "organisation" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_repository("organisation/name") is None
