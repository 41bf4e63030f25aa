"""The command `fastgen` without prefaulting, for `prefault.toml`: cache memory comes as it is first written."""

from __future__ import annotations

import sys

from fastgen.kernels.cpu import environment

environment.prepare()

from fastgen.commands.main import main  # noqa: E402  (OpenMP reads the environment when torch is imported)
from fastgen.runner.runner import ModelRunner  # noqa: E402


def _leave_memory(_runner: ModelRunner) -> None:
    """In the place of `ModelRunner.start_prefault`."""


if __name__ == "__main__":
    ModelRunner.start_prefault = _leave_memory  # type: ignore[method-assign]
    sys.exit(main())
