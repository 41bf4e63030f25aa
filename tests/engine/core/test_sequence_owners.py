"""The fields of a sequence are written by their owners only."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import fastgen
from fastgen.core import sequence
from fastgen.core.sequence import Sequence

ENGINE = Path(fastgen.__file__).parent
# Those that handle sequences. Others have objects with attributes of the same names.
PACKAGES = ("core", "engine", "kv_cache", "llm", "model", "runner", "sampling")
# They make plans without a scheduler, of sequences of their own.
WITHOUT_SCHEDULER = {"engine/calibration.py", "model/transformers_backend/self_check.py", "runner/device.py"}


def owners() -> dict[str, set[str]]:
    """Return the modules that the comment above each field names."""
    found: dict[str, set[str]] = {}
    modules: set[str] = set()
    for line in Path(sequence.__file__).read_text().splitlines():
        if line.startswith("    # Owner: "):
            modules = set(re.findall(r"[a-z_/]+\.py", line))
        elif modules and (field := re.match(r"    ([a-z_]+): ", line)):
            found[field[1]] = modules
        elif line.startswith("    def "):
            break
    return found


def writes(path: Path, names: set[str]) -> list[tuple[str, int]]:
    """Return the name and line of each assignment to one of these attributes, except to those of `self`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or node.attr not in names or not isinstance(node.ctx, ast.Store):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.append((node.attr, node.lineno))
    return found


def test_each_field_has_an_owner() -> None:
    assert owners().keys() == {field.name for field in fields(Sequence)}
    for module in set().union(*owners().values()):
        assert (ENGINE / module).is_file(), f"{module} does not exist"


def test_only_its_owner_writes_a_field() -> None:
    of_field = owners()
    for path in sorted(path for package in PACKAGES for path in (ENGINE / package).rglob("*.py")):
        module = path.relative_to(ENGINE).as_posix()
        if module in WITHOUT_SCHEDULER:
            continue
        for name, line in writes(path, set(of_field)):
            assert module in of_field[name], f"{module}:{line} writes {name}, which {of_field[name]} own"
