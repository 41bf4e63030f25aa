"""`fastgen generate`: loads a model here and writes what it says as it says it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastgen.config import EngineConfig
from fastgen.core.request import SamplingParams


def generate(
    config: EngineConfig, prompts: Sequence[str], sampling: SamplingParams, *, stop: Sequence[str], chat: bool | None
) -> None:
    """Streams an answer to each prompt to standard output, one after another.

    `chat` None uses the model's chat template where it has one.

    Raises:
        ConfigError: when the model cannot be served.
        RequestError: when it cannot serve a prompt.
    """
    with _loading_bar() as on_loading:
        from fastgen.api import LLM

        knobs = asdict(config)
        model = LLM(knobs.pop("model"), on_loading=on_loading, **knobs)
    uses_template = model.tokenizer.chat_template is not None if chat is None else chat
    for prompt in prompts:
        tokens = model.chat_prompt([{"role": "user", "content": prompt}]) if uses_template else prompt
        for delta in model.stream(tokens, sampling, stop=stop):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        sys.stdout.write("\n")


class _Bar:
    """Moves a progress bar through the stages of loading."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=1.0)

    def __call__(self, stage: str, fraction: float) -> None:
        self._progress.update(self._task, description=stage, completed=fraction)


@contextmanager
def _loading_bar() -> Iterator[_Bar]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        yield _Bar(progress)
