"""The command `fastgen` without prefaulting, for `prefault.toml`: cache memory is allocated on first write."""

from __future__ import annotations

import sys

from fastgen.kernels.cpu import environment

environment.prepare()

from fastgen.commands.main import main  # noqa: E402  (OpenMP reads the environment when torch is imported)
from fastgen.runner.runner import ModelRunner  # noqa: E402


def _no_prefault(_runner: ModelRunner) -> None:
    """Replace `ModelRunner.start_prefault`."""


if __name__ == "__main__":
    ModelRunner.start_prefault = _no_prefault  # type: ignore[method-assign]
    sys.exit(main())
