"""Text for a terminal: aligned tables, colours, ages and numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TextIO

_CODES: Final = {"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_GAP: Final = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text in one colour."""

    text: str
    colour: str = ""


Row = Sequence[Cell | str]


class Screen:
    """Writes to a stream; colours and the replacement of a whole view only on a terminal.

    Args:
        stream: default: standard output.
        environment: NO_COLOR switches colours off (no-color.org).
    """

    def __init__(self, stream: TextIO | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self._stream = stream or sys.stdout
        self.is_terminal = self._stream.isatty()
        self._coloured = self.is_terminal and not environment.get("NO_COLOR")

    def paint(self, cell: Cell | str) -> str:
        """Return the text with its colour."""
        if isinstance(cell, str) or not self._coloured or not cell.colour:
            return cell if isinstance(cell, str) else cell.text
        return f"\x1b[{_CODES[cell.colour]}m{cell.text}\x1b[0m"

    def write(self, lines: Sequence[str]) -> None:
        """Write lines."""
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()

    def replace(self, lines: Sequence[str]) -> None:
        """Show lines in place of all others on a terminal; elsewhere below them."""
        if self.is_terminal:
            self._stream.write("\x1b[H\x1b[2J")
        self.write(lines)

    def table(self, rows: Sequence[Row], *, right: Sequence[int] = ()) -> list[str]:
        """Return aligned lines. The first row is the header; the columns `right` are aligned on the right."""
        if not rows:
            return []
        texts = [[printable(cell if isinstance(cell, str) else cell.text) for cell in row] for row in rows]
        widths = [max(len(row[column]) for row in texts if column < len(row)) for column in range(len(texts[0]))]
        lines = []
        for number, row in enumerate(rows):
            parts = []
            for column, cell in enumerate(row):
                text = texts[number][column]
                space = " " * (widths[column] - len(text))
                colour = "dim" if number == 0 else "" if isinstance(cell, str) else cell.colour
                painted = self.paint(Cell(text, colour))
                last = column == len(row) - 1
                parts.append(space + painted if column in right else painted if last else painted + space)
            lines.append((" " * _GAP).join(parts).rstrip())
        return lines


def printable(text: str) -> str:
    """Return the text without control characters.

    Messages quote logs of pods, which could send commands to the terminal.
    """
    return "".join(character if character.isprintable() else " " for character in text)


def age(seconds: float) -> str:
    """Return a duration as kubectl shows it: 45s, 12m, 3h20m, 2d4h."""
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


def counted(number: float) -> str:
    """Return a count with thousands separators and at most one decimal."""
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:,.1f}"


def wrapped(text: str, width: int, indent: int) -> list[str]:
    """Return the text in lines of at most `width` characters, indented."""
    lines, line = [], ""
    for word in printable(text).split():
        if line and indent + len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [" " * indent + each for each in (*lines, line) if each]
