"""The operator's program for `support.forking`: the Kubernetes client reads $KUBECONFIG only when it is imported."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from kubernetes.config import kube_config

from fastgen_operator import main as operator


def main(arguments: Sequence[str]) -> None:
    """Run the operator with the kubeconfig of the environment, on a machine whose clock may be wrong."""
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = os.environ["KUBECONFIG"]
    if ahead := os.environ.get("CLOCK_AHEAD"):
        _set_clock_ahead(Path(ahead))
    operator.main(arguments)


def _set_clock_ahead(file: Path) -> None:
    """Let each module of the operator see a clock that is ahead by the seconds in the file."""
    real_time = time.time

    def seconds() -> float:
        return real_time() + float(file.read_text())

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.fromtimestamp(seconds(), tz)

    time.time = seconds
    for module in [each for name, each in sys.modules.items() if name.startswith("fastgen_operator.")]:
        _replace(module, Shifted)


def _replace(module: ModuleType, shifted: type[datetime.datetime]) -> None:
    if getattr(module, "datetime", None) is datetime.datetime:
        module.__dict__["datetime"] = shifted
