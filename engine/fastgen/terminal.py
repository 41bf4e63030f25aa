"""What the commands share on a terminal: bars on standard error, which show nothing where it is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastgen.config import EngineConfig
from fastgen.model.source import ModelSource

if TYPE_CHECKING:
    from fastgen.api import LLM


def load_model(config: EngineConfig) -> LLM:
    """A model in this process; a bar shows how far it is.

    Raises:
        ConfigError: when it cannot be served.
    """
    source = ModelSource.open(config.model)  # what is wrong with it shows before torch is imported
    with progress_bar() as on_loading:
        from fastgen.api import LLM

        knobs = asdict(config) | {"model": str(source.path)}
        return LLM(knobs.pop("model"), on_loading=on_loading, **knobs)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar that is moved by a stage and the share of it that is done, 0 to 1; gone when it is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda stage, fraction: progress.update(task, description=stage, completed=fraction)
