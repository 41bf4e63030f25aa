"""Run many simulations in processes, and keep their results in a file, so that an interrupted comparison goes on."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.autoscaling.results import Figures

_SAVE_SECONDS: Final = 20.0
_BAR: Final = 40

# A run: names of the trace and of the policy, and the seed.
Key = tuple[str, str, int]


@dataclass(slots=True)
class Store:
    """Results by run, in a JSON file if `path` is given.

    Attributes:
        settings: of the comparison; a file with other ones is rejected.
    """

    path: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    runs: dict[Key, Figures] = field(default_factory=dict)

    def load(self) -> None:
        """Read the results of an earlier process, if there are any."""
        if self.path is None or not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        if found["settings"] != self.settings:
            raise SystemExit(f"{self.path} has results of other settings: {found['settings']}. Give another file.")
        self.runs = {(trace, policy, seed): Figures(*values) for trace, policy, seed, *values in found["runs"]}

    def save(self) -> None:
        """Write the file, one run a line."""
        if self.path is None:
            return
        rows = ",\n".join(json.dumps([*key, *_rounded(figures)]) for key, figures in sorted(self.runs.items()))
        head = f'"settings": {json.dumps(self.settings)},\n"columns": {json.dumps(list(Figures.__slots__))}'
        part = self.path.with_suffix(".part")
        part.write_text(f'{{{head},\n"runs": [\n{rows}\n]}}\n')
        part.replace(self.path)


def _rounded(figures: Figures) -> list[float]:
    return [round(value, 5) for value in asdict(figures).values()]


# The runs of this process's pool. Policies are closures, which cannot be sent: the processes are forked and have them.
_tasks: Sequence[tuple[Key, Callable[[], Figures]]] = ()


def _run(number: int) -> tuple[Key, Figures]:
    key, task = _tasks[number]
    return key, task()


def run_all(tasks: Sequence[tuple[Key, Callable[[], Figures]]], store: Store, jobs: int) -> None:
    """Run the tasks that the store lacks in `jobs` processes, and add their results to it."""
    global _tasks  # noqa: PLW0603 - inherited by the forked processes
    _tasks = [(key, task) for key, task in tasks if key not in store.runs]
    if not _tasks:
        return
    if jobs == 1:
        _collect(map(_run, range(len(_tasks))), store)
        return
    with multiprocessing.get_context("fork").Pool(min(jobs, len(_tasks))) as pool:
        _collect(pool.imap_unordered(_run, range(len(_tasks))), store)


def _collect(results: Iterable[tuple[Key, Figures]], store: Store) -> None:
    begun = saved = time.monotonic()
    for done, (key, figures) in enumerate(results, 1):
        store.runs[key] = figures
        now = time.monotonic()
        _show(done, len(_tasks), now - begun)
        if now - saved > _SAVE_SECONDS:
            store.save()
            saved = now
    sys.stderr.write("\n")
    store.save()


def _show(done: int, total: int, seconds: float) -> None:
    if not sys.stderr.isatty() and done % max(1, total // 20) and done < total:
        return
    bar = "#" * (_BAR * done // total)
    left = seconds / done * (total - done)
    end = "\r" if sys.stderr.isatty() else "\n"
    sys.stderr.write(f"[{bar:{_BAR}}] {done}/{total}, {left:.0f} s left {end}")
    sys.stderr.flush()
