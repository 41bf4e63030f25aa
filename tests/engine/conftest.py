from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fastgen.kernels.cpu import environment

# Before anything imports torch: OpenMP and numba read their settings once. One thread, because two threads of a small
# model mostly wait for each other, and other test processes use the other cores. test_instruction_sets.py runs the
# kernels with all threads, and test_loader.py and pods run whole models with them.
for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
environment.prepare()

import pytest  # noqa: E402

from support.demo_weights import demo_model  # noqa: E402

if TYPE_CHECKING:
    from fastgen.model.source import ModelSource
    from fastgen.runner.runner import ModelRunner


@pytest.fixture(autouse=True)
def _root_logging() -> Iterator[None]:
    """Undo logging set-up: commands log to a standard error that is closed when their test ends."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture(scope="session")
def demo_source() -> ModelSource:
    """SmolLM2-135M-Instruct, Q4_1."""
    from fastgen.model.source import ModelSource

    return ModelSource.open(str(demo_model()))


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that loads at once, with the demo model's tokenizer."""
    from support.small_model import save_small_model

    return save_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def demo_runner() -> ModelRunner:
    """A runner over it with 91 blocks of 64 tokens."""
    from support.driving import load

    return load(demo_model())
