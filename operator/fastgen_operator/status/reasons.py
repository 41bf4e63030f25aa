"""The meaning and the remedy of each reason of a condition, from reasons.yaml. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import yaml

PAGE: Final = Path("docs/operations.md")
_HEADER: Final = "| reason | status | what it means | what to do |\n|---|---|---|---|\n"


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason of a condition, in Markdown; the action is empty if there is nothing to do."""

    status: str
    meaning: str
    action: str = ""


@cache
def all_reasons() -> dict[str, dict[str, Reason]]:
    """Return the reasons by condition and name. One with the same meaning for several conditions is listed once."""
    found = yaml.safe_load(files(__package__).joinpath("reasons.yaml").read_text())
    return {kind: {name: Reason(**of) for name, of in reasons.items()} for kind, reasons in found.items()}


def remedy(kind: str, reason: str, status: str) -> str:
    """Return what to do about a condition; empty if nothing is to be done, or its reason or status is unknown.

    Links are replaced by their titles and the page.
    """
    known = all_reasons()
    tables = [known.get(kind, {}), *known.values()]
    found = (table[reason] for table in tables if reason in table)
    action = next((each.action for each in found if each.status == status), "")
    return "" if action.startswith("Nothing.") else re.sub(r"\[([^]]+)\]\([^)]+\)", rf'"\1" in {PAGE}', action)


def page_with_reasons(page: str) -> str:
    """Return the text of `PAGE` with the table of each condition's reasons."""
    for kind, reasons in all_reasons().items():
        before, heading, after = page.partition(f"\n### {kind}\n")
        intro, _, rest = after.partition(_HEADER)
        rest = re.sub(r"\A(\|[^\n]*\n)*", "", rest)
        rows = (
            f"| `{name}` | {of.status} | {of.meaning} | {f'{of.action} ' * bool(of.action)}|\n"
            for name, of in reasons.items()
        )
        page = before + heading + intro + _HEADER + "".join(rows) + rest
    return page
