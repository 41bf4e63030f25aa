"""Stands in for packages that the engine imports, but that its path on a GPU does not need.

A machine with only torch, triton and transformers can then run `benchmarks.gpu` and `tests/gpu`.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class _Struct:
    """Replaces `msgspec.Struct` where structs are created and read, but not encoded."""

    def __init_subclass__(cls, **options: Any) -> None:
        dataclass(kw_only=options.get("kw_only", False))(cls)


class _Features:
    """Replaces `llvmlite.binding`: a processor without vector extensions."""

    @staticmethod
    def get_host_cpu_features() -> _Features:
        return _Features()

    @staticmethod
    def flatten() -> str:
        return ""


def install() -> None:
    """Add a stand-in for each of the packages that is not installed. Call it before the engine is imported."""
    _add("msgspec", Struct=_Struct)
    _add("llvmlite", binding=_Features)


def _add(name: str, **attributes: Any) -> None:
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
