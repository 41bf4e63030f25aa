"""SECURITY.md: what the gateway promises, and what it does not promise, names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parents[1] / "SECURITY.md").read_text()
SECTION = PAGE.partition("## What the gateway promises about clients\n")[2].partition("\n## ")[0]


def test_each_promise_names_tests_that_exist() -> None:
    rows = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[1] != "tests"]
    assert len(rows) >= 8
    for promise, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert ", ".join(f"`{file}::{test}`" for file, test in named) == tests, promise
        for file, test in named:
            assert f"def {test}(" in (TESTS / file).read_text(), f"{file} has no {test}"


def test_the_promises_stand_in_tables() -> None:
    paragraphs = [text for text in SECTION.strip().split("\n\n") if not text.startswith("| ")]
    assert [text.split(maxsplit=2)[:2] for text in paragraphs] == [
        ["With", "`gateway.apiKeys.secretName`."],
        ["Not", "promised,"],
    ]
