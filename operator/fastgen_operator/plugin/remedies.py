"""What to do about each reason of a condition: docs/operations.md as remedies.json."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

PAGE: Final = Path("docs/operations.md")
DATA: Final = Path(__file__).with_name("remedies.json")

# What to do, by condition, reason and status.
Remedies = dict[str, dict[str, dict[str, str]]]


def remedies_of(page: str) -> Remedies:
    """Return the column "what to do" of the page's tables of reasons, without empty rows."""
    found: Remedies = {}
    kind = ""
    for line in page.splitlines():
        if heading := re.match(r"#{2,3} (\w+)$", line):
            kind = heading[1]
        row = re.match(r"\| `(\w+)` \| (True|False|Unknown) \| .* \| (.*) \|$", line)
        if row and row[3]:
            found.setdefault(kind, {}).setdefault(row[1], {})[row[2]] = _plain(row[3])
    return found


def remedy(kind: str, reason: str, status: str) -> str:
    """Return what to do about a condition; empty if nothing is wrong.

    The page describes a reason that several conditions share under one of them only.
    """
    known = _load()
    tables = [known.get(kind, {}), *known.values()]
    found = next((table[reason][status] for table in tables if status in table.get(reason, {})), "")
    return "" if found.startswith("Nothing.") else found


@cache
def _load() -> Remedies:
    data: Remedies = json.loads(files(__package__).joinpath(DATA.name).read_text())
    return data


def _plain(text: str) -> str:
    """Return Markdown as plain text; links become their titles."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r'"\1" in docs/operations.md', text).strip()
