from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import Serving, serving


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server over the scripted engine, shared by tests that leave it as it was."""
    options = ("--served-model-name", "smollm2", "other-name", "--max-model-length", "512")
    with serving(tmp_path_factory.mktemp("scripted"), *options) as server:
        server.wait_status("/ready", 200)
        yield server
