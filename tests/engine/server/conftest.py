from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.server.serving import Serving, serving


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server over the scripted engine, shared by tests that leave it as it was."""
    options = ("--served-model-name", "smollm2", "other-name", "--max-model-length", "512")
    with serving(tmp_path_factory.mktemp("scripted"), *options) as server:
        server.wait_status("/ready", 200)
        yield server


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """As `scripted`, with passes of 20 ms: time to do something to a request under way."""
    with serving(tmp_path_factory.mktemp("slow"), environment={"SCRIPT_PASS_SECONDS": "0.02"}) as server:
        server.wait_status("/ready", 200)
        yield server
