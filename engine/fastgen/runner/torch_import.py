"""Imports torch without its meta kernels, which are a third of the time that the import takes.

A meta kernel computes the shape of a result without data, for tensors on the device `meta` and to trace programs.
Native models on CPUs need none. See docs/decisions/072-torch-without-meta-kernels.md.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from fastgen.model.source import ModelSource
from fastgen.settings import EngineConfig

META_KERNELS = "torch._meta_registrations"


def import_torch() -> None:
    """Import torch, if it has not been imported, without its meta kernels.

    Call `import_meta_kernels` before importing a module of torch that torch itself does not import: such a module may
    import the meta kernels' modules in an order in which they fail.
    """
    if "torch" in sys.modules:
        return
    stand_in = sys.modules[META_KERNELS] = _StandIn(META_KERNELS)
    try:
        importlib.import_module("torch")
    finally:
        if sys.modules.get(META_KERNELS) is stand_in:
            del sys.modules[META_KERNELS]


def import_meta_kernels(source: ModelSource, config: EngineConfig) -> None:
    """Import what `import_torch` left out, unless the CPU kernels run the model in this process alone."""
    on_cpu = source.native is not None and config.device == "cpu" and config.dtype != "float16"
    if "torch" in sys.modules and not (on_cpu and config.tensor_parallel == 1):
        importlib.import_module(META_KERNELS)


class _StandIn(ModuleType):
    """The module of the meta kernels while torch is imported. It imports them if torch asks for a name in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the import system
            raise AttributeError(name)
        if sys.modules.get(META_KERNELS) is self:
            del sys.modules[META_KERNELS]
        return getattr(importlib.import_module(META_KERNELS), name)
