from __future__ import annotations

from fastgen.kernels.cpu import environment

# Before anything imports torch: OpenMP and numba read their settings once.
environment.prepare()

import pytest  # noqa: E402

from fastgen.model.source import ModelSource  # noqa: E402
from fastgen.runner.runner import ModelRunner  # noqa: E402
from support.driving import demo_model, load  # noqa: E402


@pytest.fixture(scope="session")
def demo_source() -> ModelSource:
    """SmolLM2-135M-Instruct, Q4_1."""
    return ModelSource.open(str(demo_model()))


@pytest.fixture(scope="session")
def demo_runner() -> ModelRunner:
    """A runner over it with 91 blocks of 64 tokens."""
    return load(demo_model())
