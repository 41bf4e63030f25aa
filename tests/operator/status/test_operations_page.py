"""reasons.yaml, and so docs/operations.md, and docs/capacity.md list exactly the reasons that the operator can set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import fastgen_operator
from fastgen_operator.autoscale.supply import PodState
from fastgen_operator.status.conditions.ready import READY
from fastgen_operator.status.conditions.table import ORDER
from fastgen_operator.status.reasons import all_reasons, page_with_reasons

CODE = Path(fastgen_operator.__file__).parent
CONDITIONS = CODE / "status" / "conditions"
DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "operations.md"
# The states of pods, and the reasons of the autoscaler's changes.
CAPACITY = DOCS / "capacity.md"
# Functions that create a reason, and the argument that contains it.
MAKERS = {
    **{"Condition": 1, "true": 0, "false": 0, "unknown": 0},
    **{"Problem": 0, "Failure": 0, "Rollback": 0, "Hold": 0, "Limit": 0, "Change": 0},
}
REASON = re.compile(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*")


def reasons_in_code() -> set[str]:
    """Return all reasons that the operator can set."""
    return set().union(*reasons_by_file().values())


@cache
def reasons_by_file() -> dict[Path, set[str]]:
    """Return the strings that reach these functions, through variables, tables, conditional expressions and helpers."""
    modules = {path: ast.parse(path.read_text()) for path in CODE.rglob("*.py")}
    constants = {name: value for module in modules.values() for name, value in _constants(module)}
    by_file: dict[Path, set[str]] = {}
    for path, module in modules.items():
        found = by_file[path] = set()
        makers = {**MAKERS, **_helpers(module)}
        local = {**constants, **dict(_constants(module))}
        for function in [module, *(n for n in ast.walk(module) if isinstance(n, ast.FunctionDef))]:
            assigned = _assigned(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and (place := makers.get(_name(node.func))) is not None:
                    argument = _argument(node, place)
                    if argument is not None:
                        found |= set(_words(argument, assigned, local))
    return by_file


def _assigned(function: ast.AST) -> dict[str, list[ast.expr]]:
    """Return the values that a function assigns to each of its variables."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _calls(paths: Iterable[Path]) -> Iterator[tuple[ast.Call, dict[str, list[ast.expr]]]]:
    """Yield the calls within functions, with the values of the function's variables."""
    for path in paths:
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
            assigned = _assigned(function)
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                yield call, dict(assigned)


def _argument(call: ast.Call, place: int) -> ast.expr | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
    return named[0] if named else call.args[place] if len(call.args) > place else None


def _words(node: ast.expr, assigned: dict[str, list[ast.expr]], constants: dict[str, ast.expr]) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and REASON.fullmatch(node.value):
            yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _words(node.body, assigned, constants)
        yield from _words(node.orelse, assigned, constants)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from _words(value, assigned, constants)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        for part in (node.func.value, *node.args[1:]):
            yield from _words(part, assigned, constants)
    elif isinstance(node, (ast.Name, ast.Attribute)):
        name = _name(node)
        if isinstance(node, ast.Name):
            for value in assigned.pop(name, []):
                yield from _words(value, assigned, constants)
        if name in constants:
            yield from _words(constants[name], assigned, {k: v for k, v in constants.items() if k != name})


def _helpers(module: ast.Module) -> dict[str, int]:
    """Return the functions of a module that pass a parameter on as the reason, with its position."""
    found = {}
    for function in module.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        names = [argument.arg for argument in function.args.args]
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (place := MAKERS.get(_name(node.func))) is not None:
                argument = _argument(node, place)
                if isinstance(argument, ast.Name) and argument.id in names:
                    found[function.name] = names.index(argument.id)
    return found


def _constants(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def reasons_on_the_pages() -> set[str]:
    lines = (line for page in (PAGE, CAPACITY) for line in page.read_text().splitlines())
    return {match for line in lines for match in re.findall(r"^\| `([A-Z]\w+)` \|", line)}


def test_every_reason_stands_on_a_page_and_no_other() -> None:
    code, page = reasons_in_code(), reasons_on_the_pages()
    assert len(code) > 20, "the search finds nothing any more"
    assert sorted(code - page) == [], "not on a page"
    assert sorted(page - code) == [], "no longer in the code"


def test_every_condition_has_a_section() -> None:
    page = PAGE.read_text()
    assert [kind for kind in ORDER if f"\n### {kind}\n" not in page] == []
    assert f"`{READY}`" in page
    assert sorted(re.findall(r"^### (?!FastGen)(\w+)$", page, flags=re.MULTILINE)) == sorted(ORDER)


def test_the_tables_of_the_page_are_generated() -> None:
    assert page_with_reasons(PAGE.read_text()) == PAGE.read_text(), "run make generate"
    edited = PAGE.read_text().replace("| `AllScheduled` | True |", "| `AllScheduled` | False |")
    assert page_with_reasons(edited) == PAGE.read_text()


def module_of(kind: str) -> Path:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()
    return CONDITIONS / f"{name}.py"


@pytest.mark.parametrize("kind", ORDER)
def test_a_condition_has_the_reasons_that_its_code_sets_and_others_name_those_that_they_share(kind: str) -> None:
    shared = {
        name
        for reasons in all_reasons().values()
        for name, reason in reasons.items()
        if f"Also a reason of {kind}" in reason.meaning or "Also a reason of other conditions" in reason.meaning
    }
    assert sorted(reasons_by_file()[module_of(kind)] - all_reasons()[kind].keys() - shared) == []


def statuses(kind: str) -> set[tuple[str, str]]:
    """Return reasons of a condition with their status, as far as its module creates them directly."""
    found = set()
    for call, assigned in _calls([module_of(kind)]):
        match _name(call.func).lstrip("_"), call.args:
            case (("true" | "false" | "unknown" as helper), [reason, *_]):
                found |= {(word, helper.title()) for word in _words(reason, assigned, {})}
    return found


@pytest.mark.parametrize("kind", ORDER)
def test_each_reason_has_the_status_on_the_page_that_the_code_sets(kind: str) -> None:
    found = statuses(kind)
    assert found, "the search finds nothing any more"
    shown = all_reasons()[kind]
    assert [pair for pair in sorted(found) if pair[0] in shown and shown[pair[0]].status != pair[1]] == []


def test_every_reason_of_an_event_is_on_the_page() -> None:
    notices = (each for each in _calls(CODE.rglob("*.py")) if _name(each[0].func) == "Notice")
    events = {word for call, assigned in notices for word in _words(call.args[1], assigned, {})}
    assert {"Applied", "ScaledUp"} <= events, "the search finds nothing any more"
    assert [reason for reason in sorted(events) if f"`{reason}`" not in PAGE.read_text()] == []


def test_the_states_of_pods_are_those_of_the_supply() -> None:
    assert re.findall(r"^\| (\w+) \| (?:yes|no) \|", CAPACITY.read_text(), re.MULTILINE) == list(get_args(PodState))


@pytest.mark.parametrize("page", [PAGE, CAPACITY], ids=lambda page: page.stem)
def test_every_metric_that_a_page_names_is_one_of_the_operator(page: Path) -> None:
    exposed = (CODE / "metrics.py").read_text()
    named = set(re.findall(r"fastgen_operator_\w+", page.read_text()))
    assert named
    assert [name for name in named if name.removesuffix("_total") not in exposed] == []
