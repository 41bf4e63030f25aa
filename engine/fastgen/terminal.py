"""A progress bar on standard error, shown only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Yield a function that updates the bar with a stage and its completed fraction, 0 to 1."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(stage: str, fraction: float) -> None:
            begins = stage != progress.tasks[task].description  # show it at once: it may end before the next refresh
            progress.update(task, description=stage, completed=fraction, refresh=begins)

        yield show
