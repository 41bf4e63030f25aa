"""Detects an engine that hangs: it has work and finishes no step in time.

It runs in the server, not in the engine. The engine's step model and a setting determine how long a step may take.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fastgen.core.step_times import StepWork
from fastgen.link.messages import EngineInfo, StepReport

# A step may take this many times what the model predicts for the largest step.
_FACTOR = 20.0
# But never more than this many times the setting: a model fitted to few steps may be far off.
_MOST = 10.0
# The first steps always get this maximum, because they may compile kernels.
_FIRST_STEPS = 16


class Watchdog:
    """Measures how long the engine has had work without finishing a step.

    Only time in which this process ran counts: while the machine is suspended, or both processes are stopped, the
    engine cannot run either. Nor does time count in which the engine waited for a processor, except that at least a
    tenth of all time counts.

    Args:
        timeout: as `ServerConfig.step_timeout_seconds`.
        info: tells the size of the largest step.

    Attributes:
        period: seconds between two calls of `look`.
    """

    def __init__(self, timeout: float, info: EngineInfo) -> None:
        self.period = min(1.0, timeout / 20)
        self._timeout = timeout
        # All tokens of the budget in one prompt, at the end of the longest context.
        pairs = info.token_budget * info.max_model_length
        self._largest = StepWork(info.token_budget, info.num_blocks * info.block_size, pairs)
        self._predicted = 0.0
        self._num_steps = 0
        self._waited = 0.0
        self._looked: float | None = None

    @property
    def deadline(self) -> float:
        """Seconds after which the engine counts as hung."""
        if self._num_steps < _FIRST_STEPS:
            return _MOST * self._timeout
        return min(max(self._timeout, _FACTOR * self._predicted), _MOST * self._timeout)

    @property
    def is_late(self) -> bool:
        """Whether half of the deadline has passed: other replicas should get the requests."""
        return self._waited > self.deadline / 2

    @property
    def is_hung(self) -> bool:
        """Whether the deadline has passed."""
        return self._waited > self.deadline

    def record(self, report: StepReport) -> None:
        """Record a report of the engine: it made progress."""
        self._waited = 0.0
        self._num_steps += report.step.step_seconds > 0
        self._predicted = report.step_model.seconds(self._largest)

    def look(self, now: float, *, has_work: bool, starved: float = 0.0) -> None:
        """Count the time since the last call.

        Args:
            now: seconds on a monotonic clock.
            has_work: whether the engine has requests, or owes a report.
            starved: seconds in which the engine has waited for a processor, since the last call.
        """
        if not has_work:
            self._waited = 0.0
        elif self._looked is not None:
            elapsed = min(now - self._looked, 2 * self.period)
            self._waited += max(elapsed - starved, elapsed / _MOST)
        self._looked = now

    def message(self) -> str:
        """Return one line: what happened and what to check."""
        state = "hangs" if self.is_hung else "may hang"
        return (
            f"the engine {state}: it has had work for {self._waited:.0f} s without finishing a step; on a GPU, look "
            "for Xid messages in the node's dmesg; raise --step-timeout-seconds if its steps take that long"
        )


def seconds_waited(thread: Path) -> float:
    """Return how long a thread could run and had no processor; `thread` is its folder in /proc.

    Raises:
        OSError: if it has ended.
        IndexError: if the kernel does not count it.
    """
    return int((thread / "schedstat").read_text().split()[1]) / 1e9


class ProcessorWait:
    """Measures how long a process has waited for a processor: its thread that waited longest."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._seconds = self._read()

    def since_last(self) -> float:
        """Return the seconds waited since the last call; 0 where the kernel does not count them."""
        before, self._seconds = self._seconds, self._read()
        return max((seconds - before.get(task, seconds) for task, seconds in self._seconds.items()), default=0.0)

    def _read(self) -> dict[str, float]:
        """Return how long each thread has waited on the run queue, in seconds."""
        found = {}
        with suppress(OSError):
            for task in self._tasks.iterdir():
                with suppress(OSError, IndexError):  # a thread that has ended
                    found[task.name] = seconds_waited(task)
        return found
