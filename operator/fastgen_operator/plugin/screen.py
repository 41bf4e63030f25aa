"""Text for a terminal: aligned tables, colours, wrapped lines and ages."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TextIO

_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_RESET: Final = "\x1b[0m"
_PAINTED: Final = re.compile("(\x1b\\[(?:0|" + "|".join(_CODES.values()) + ")m)")
_GAP: Final = " " * 3
_WIDTH: Final = 120


@dataclass(frozen=True, slots=True)
class Cell:
    """A text in one colour."""

    text: str
    colour: str = ""


Row = Sequence[Cell | str]


class Screen:
    """Writes to a stream; colours and the replacement of a view only on a terminal.

    Args:
        stream: default: standard output.
        environment: NO_COLOR switches colours off (no-color.org).
    """

    def __init__(self, stream: TextIO | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self._stream = stream or sys.stdout
        self.is_terminal = self._stream.isatty()
        self._has_colours = self.is_terminal and not environment.get("NO_COLOR")

    def paint(self, text: str, colour: str) -> str:
        """Return the text in the colour, with its control characters replaced by spaces.

        It is returned unchanged if the screen shows no colours or the colour is empty.
        """
        return f"\x1b[{_CODES[colour]}m{printable(text)}{_RESET}" if self._has_colours and colour else text

    def write(self, lines: Sequence[str]) -> None:
        """Write lines, without control characters other than the codes of `paint`."""
        self._stream.write("".join(f"{self._safe(line)}\n" for line in lines))
        self._stream.flush()

    def write_json(self, value: Any) -> None:
        """Write a JSON value."""
        self.write(json.dumps(value, indent=2).split("\n"))

    def _safe(self, line: str) -> str:
        if not self._has_colours:
            return printable(line)
        text, *others = _PAINTED.split(line)
        painted = "".join(part if number % 2 == 0 else printable(part) for number, part in enumerate(others))
        return printable(text) + painted + (_RESET if others else "")

    def replace(self, lines: Sequence[str]) -> None:
        """Write lines, on a terminal in place of all others."""
        if self.is_terminal:
            self._stream.write("\x1b[H\x1b[2J")
        self.write(lines)

    def table(self, rows: Sequence[Row], *, right: Container[int] = (), most: int | None = None) -> list[str]:
        """Return aligned lines; the first row is the header.

        Args:
            right: the columns to align on the right.
            most: maximum length of the texts in the last column, in characters.
        """
        header, *body = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
        cells = [[Cell(cell.text.upper(), "dim") for cell in header], *body]
        if most is not None:
            for row in body:
                row[-1] = Cell(_shortened(row[-1].text, most), row[-1].colour)
        widths = [max(len(cell.text) for cell in column) for column in zip(*cells, strict=True)]
        lines = []
        for row in cells:
            parts = []
            for column, cell in enumerate(row):
                space = " " * (widths[column] - len(cell.text))
                painted = self.paint(printable(cell.text), cell.colour)
                parts.append(space + painted if column in right else painted + space)
            lines.append(_GAP.join(parts).rstrip())
        return lines


def printable(text: str) -> str:
    """Return the text with a space for each character that cannot be printed, such as a control character.

    Messages quote logs of pods, which could send commands to the terminal.
    """
    return "".join(character if character.isprintable() else " " for character in text)


def age(seconds: float) -> str:
    """Return a duration in kubectl's style: 45s, 12m, 3h20m, 2d4h."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    if whole < 3 * 3600:
        return f"{whole // 60}m"
    if whole < 48 * 3600:
        hours, rest = divmod(whole, 3600)
        return f"{hours}h{rest // 60}m" if hours < 8 and rest >= 60 else f"{hours}h"
    days, rest = divmod(whole, 86400)
    return f"{days}d{rest // 3600}h" if days < 8 and rest >= 3600 else f"{days}d"


def age_of(time: str | None, now: datetime) -> str:
    """Return the age of an RFC 3339 time; a dash without one."""
    return "-" if not time else age((now - datetime.fromisoformat(time)).total_seconds())


def _shortened(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def wrapped(text: str, indent: int, title: str = "") -> list[str]:
    """Return the text in indented lines, with a title in the indentation of the first."""
    return textwrap.wrap(
        " ".join(printable(text).split()),
        _WIDTH,
        initial_indent=title.ljust(indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
