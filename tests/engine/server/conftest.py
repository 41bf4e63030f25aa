from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.server.harmony_model import write_harmony_model
from engine.server.serving import Serving, serving
from engine.server.thinking_model import write_thinking_model
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.text.tokenizer import Tokenizer
from support import demo_weights


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the scripted engine, shared by tests that leave it unchanged."""
    options = ("--served-model-name", "smollm2", "other-name", "--max-model-length", "512")
    with serving(tmp_path_factory.mktemp("scripted"), *options) as server:
        server.wait_status("/ready", 200)
        yield server


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Like `scripted`, with steps of 20 ms: time to act on a running request."""
    with serving(tmp_path_factory.mktemp("slow"), environment={"SCRIPT_STEP_SECONDS": "0.02"}) as server:
        server.wait_status("/ready", 200)
        yield server


@pytest.fixture(scope="session")
def thinking(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the scripted engine for a model that thinks between <think> and </think>."""
    folder = tmp_path_factory.mktemp("thinking")
    write_thinking_model(folder, smollm2)
    with serving(folder, "--trust-request-chat-template", model=str(folder)) as server:
        server.wait_status("/ready", 200)
        yield server


@pytest.fixture(scope="session")
def harmony(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the scripted engine for a model that writes Harmony's messages."""
    folder = tmp_path_factory.mktemp("harmony")
    write_harmony_model(folder, smollm2)
    with serving(folder, model=str(folder)) as server:
        server.wait_status("/ready", 200)
        yield server


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the scripted engine that embeds."""
    options = ("--served-model-name", "embedder", "--max-model-length", "512", "--task", "embed", "--pooling", "mean")
    with serving(tmp_path_factory.mktemp("embedder"), *options) as server:
        server.wait_status("/ready", 200)
        yield server


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The demo model's tokenizer."""
    return Tokenizer.load(GGUFFile(Path(str(demo_weights.demo_model()))).metadata)
