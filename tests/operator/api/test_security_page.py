"""SECURITY.md: each promise about authors, tenants and the operator's credentials names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "SECURITY.md").read_text().partition("## Who reaches what")[2].partition("\n## ")[0]


def test_each_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| ([^|]+\.) \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 18
    for promise, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, promise
        assert ", ".join(f"`{path}::{test}`" for path, test in named) == tests, promise
        for path, test in named:
            assert f"def {test}(" in (ROOT / "tests" / path).read_text(), f"{path} has no {test}"
