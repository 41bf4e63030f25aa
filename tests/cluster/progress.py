"""Progress output of a command that takes minutes: its steps, what each waits for, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


class Progress:
    """Consecutive steps. On a terminal the current one has a live line; otherwise all lines are plain.

    Args:
        steps: how many there will be. Each is shown with its number; they differ in length, so there is no percentage.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self._steps = steps
        self._begun = 0
        self._started = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[Progress]:
        """Run one step, and print its duration at the end. A step that fails is not ticked off."""
        began = time.monotonic()
        self._begun += 1
        title = f"{self._begun}/{self._steps} {title}"
        if not self.console.is_terminal:
            self.console.print(f"{escape(title)} …")
        with self.console.status(escape(title)):
            yield self
        self.console.print(f"[green]✓[/green] {escape(title)} [dim]({time.monotonic() - began:.1f} s)[/dim]")

    def say(self, line: str) -> None:
        """Print what the current step does or waits for."""
        self.console.print(f"  [dim]{time.monotonic() - self._started:6.1f} s[/dim]  {escape(line)}", highlight=False)
