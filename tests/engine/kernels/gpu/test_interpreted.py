"""The fixture `interpreted` and compilation do not disturb each other in one process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

Import = Callable[[str], ModuleType]


def kind_of_library_function() -> str:
    return type(importlib.import_module("triton.language").max).__name__


@pytest.fixture
def compiled() -> ModuleType:
    assert kind_of_library_function() == "JITFunction"
    return importlib.import_module("fastgen.kernels.triton.variant")


def test_kernels_are_interpreted_after_triton_was_imported_for_compilation(
    compiled: ModuleType, interpreted: Import
) -> None:
    assert interpreted("variant") is not compiled
    assert kind_of_library_function() == "InterpretedFunction"


def test_kernels_are_compiled_after_an_interpreted_test(compiled: ModuleType) -> None:
    package = importlib.import_module("fastgen.kernels.triton")
    assert package.variant is compiled
    assert sys.modules["fastgen.kernels"].triton is package


def test_interpreted_modules_are_imported_once(interpreted: Import, request: pytest.FixtureRequest) -> None:
    kept = request.getfixturevalue("_interpreted_modules")
    if "triton.language" in kept:
        assert importlib.import_module("triton.language") is kept["triton.language"]
    assert interpreted("variant") is interpreted("variant")
