"""SECURITY.md: what the engine promises, and what it does not promise, names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "SECURITY.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[tuple[str, str]]:
    """Return the sentences and the tests of the tables of a section."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ") and line.endswith(" |")]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines]
    assert all(len(row) == 2 for row in cells)
    return [(sentence.strip(), tests.strip()) for sentence, tests in cells if tests.strip() not in ("test", "tests")]


@pytest.mark.parametrize(
    ("title", "num"), [("What the engine promises about requests", 10), ("Tenants, keys and users", 15)]
)
def test_each_sentence_names_tests_that_exist(title: str, num: int) -> None:
    assert len(rows(title)) >= num
    for sentence, tests in rows(title):
        named = re.findall(r"`([^`]+)`", tests)
        assert named, sentence
        assert ", ".join(f"`{test}`" for test in named) == tests, sentence
        for test in named:
            path, _, function = test.partition("::")
            folders = ("", "tests/engine", "tests/engine/server")
            files = [ROOT / folder / path for folder in folders if (ROOT / folder / path).is_file()]
            assert files, test
            assert f"def {function}(" in files[0].read_text() if function else True, test


@pytest.mark.parametrize("title", ["What the engine promises about requests", "Tenants, keys and users"])
def test_no_sentence_stands_outside_the_tables(title: str) -> None:
    prose = " ".join(line for line in section(title).splitlines() if line and not line.startswith("|"))
    assert re.sub(r"A \*key\* is .* a client sends\. ", "", prose) in (
        "Not promised, as these tests show:",
        "Each promise names its tests, in `tests/engine`. Not promised, as these tests show:",
    )
