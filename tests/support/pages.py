"""The documentation's code blocks and commands, for tests that try them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.manifests import load_all

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield "page:line" and the text of each fenced code block of a language, nested ones in lists included."""
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(rf"^( *)```{language}\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
            number = text.count("\n", 0, found.start()) + 1
            yield f"{page.relative_to(ROOT)}:{number}", textwrap.dedent(found[2])


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield "page:line" and each object of the YAML blocks."""
    for place, text in blocks("yaml"):
        for document in load_all(text):
            assert isinstance(document, dict), place
            yield place, document


def commands(program: str) -> Iterator[tuple[str, str]]:
    """Yield "page:line" and each command of a program, on one line, without a prompt or a comment.

    They are those of the shell blocks and, in the text, code that has at least two words after the program's name:
    `kubectl apply` in a sentence is the name of a command.
    """
    for language, prompt in (("sh", ""), ("console", "$ ")):
        for place, text in blocks(language):
            for line in text.replace("\\\n", " ").splitlines():
                if line.startswith(f"{prompt}{program} "):
                    yield place, _without_comment(line.removeprefix(prompt))
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(rf"(?<!`)`({program}(?:\s+[^`\s]+){{3}}[^`]*|{program}(?:\s+[^`\s]+){{2}})`", text):
            number = text.count("\n", 0, found.start()) + 1
            yield f"{page.relative_to(ROOT)}:{number}", " ".join(found[1].split())


def _without_comment(command: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\s#\s.*", "", command)).strip()
