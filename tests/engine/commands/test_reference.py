"""Generated documents are up to date, and other pages agree with the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from fastgen.commands.reference import FIELDS_PATH, FLAGS_PATH, flags_page
from fastgen.mii.arguments import GenerateArguments
from fastgen.server.openai.field_table import fields_page
from fastgen.settings import ENGINE_SETTINGS, SERVER_SETTINGS

ROOT = Path(__file__).parents[3]
VLLM = "coming-from/vllm.md"
PAGES = (
    "guide.md",
    VLLM,
    "coming-from/deepspeed-mii.md",
    "concepts/splitfuse.md",
    "concepts/paged-kv-cache.md",
    "limits.md",
    "sizing.md",
    "troubleshooting.md",
)


def test_the_committed_reference_is_up_to_date() -> None:
    assert (ROOT / FLAGS_PATH).read_text() == flags_page(), "run: python -m fastgen.commands.reference --write"
    assert (ROOT / FIELDS_PATH).read_text() == fields_page(), "run: python -m fastgen.commands.reference --write"


def test_the_reference_names_every_setting() -> None:
    page = flags_page()
    for setting in (*ENGINE_SETTINGS, *SERVER_SETTINGS):
        assert f"| `{setting.flag}` |" in page
        assert setting.help in page


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_flags_that_exist(page: str) -> None:
    from fastgen.commands.main import _parser

    text = (ROOT / "docs" / page).read_text()
    if page == VLLM:
        # The first column has vLLM's flags, unless ours is the same.
        text = "".join(line if "| the same |" in line else line.split("|", 2)[-1] for line in text.splitlines(True))
    whole = _parser()
    commands = whole._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    known = {flag for command in (whole, *commands.values()) for flag in command._option_string_actions}  # type: ignore[union-attr, attr-defined]
    of_others = re.compile(r"^(?:helm|kubectl) .*$", re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", of_others.sub("", text)))
    assert named - known == set()


def test_links_between_pages_are_valid() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_mii_page_maps_every_argument_of_generate() -> None:
    text = (ROOT / "docs" / "coming-from" / "deepspeed-mii.md").read_text()
    for field in dataclasses.fields(GenerateArguments):
        if field.name != "more":
            assert f"`{field.name}`" in text
