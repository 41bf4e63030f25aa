"""A public name that two modules of a program define means the same thing in both."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Packages of the HTTP process, and of the programs that run the engine in process.
PACKAGES = ("server", "text", "link", "llm", "mii")
ALLOWED = {
    "T": "a type variable",
    "build": "a tokenizer from each kind of file",
    "log": "the logger of each module",
    "named_special_tokens": "of a tokenizer, from each kind of file",
    "router": "the routes of each module",
}


def defined(file: Path) -> set[str]:
    """Return the functions, classes and constants of a module."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                found.add(name)
            case ast.Assign(targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(ast.Name(name)):
                found.add(name)
    return {name for name in found if not name.startswith("_")}


def test_no_name_of_the_server_or_of_the_text_package_means_two_things() -> None:
    files = defaultdict[str, list[str]](list)
    for package in PACKAGES:
        for file in sorted((ROOT / "engine/fastgen" / package).rglob("*.py")):
            for name in defined(file):
                files[name].append(str(file.relative_to(ROOT)))
    repeated = {name: where for name, where in files.items() if len(where) > 1}
    assert {name: where for name, where in repeated.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() <= repeated.keys(), "remove what repeats no more"
