"""Distributes step reports to watchers of the server. Without a watcher the engine sends no traces."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict

import msgspec

from fastgen.core.stats import SchedulerStats, StepTrace
from fastgen.link.messages import StepReport
from fastgen.server.http.api_error import APIError

# Steps that are kept for a slow watcher. Older ones are dropped.
_MOST_PENDING = 256
# Steps that arrive within this time are sent together: a small model runs hundreds per second.
_BATCH_SECONDS = 0.05
_MOST_WATCHERS = 16


class Step(msgspec.Struct, frozen=True):
    """One step as watchers see it.

    Attributes:
        number: counts the steps that had a watcher since the server started.
        seconds: duration.
        decodes, prompts: as in `StepTrace`.
        preemptions: sequences that this step preempted.
    """

    number: int
    seconds: float
    decodes: list[str]
    prompts: list[tuple[str, int]]
    preemptions: int


class Update(msgspec.Struct, frozen=True):
    """One event for a watcher.

    Attributes:
        steps: since the last update, oldest first.
        dropped: steps that this watcher missed since the last update because it reads too slowly.
        state: fields of `SchedulerStats` after the last step.
        queue, blocks: as in `StepTrace`, after the last step.
    """

    steps: list[Step]
    dropped: int
    state: dict[str, float]
    queue: list[tuple[str, int]]
    blocks: list[tuple[str, int]]


class StepFeed:
    """Distributes reports to watchers without waiting for them: each has a bounded queue of the newest steps."""

    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()
        self._num_steps = 0
        self._is_closed = False

    def record(self, report: StepReport) -> None:
        """Queue a report for every watcher. Reports without a trace are ignored."""
        trace = report.trace
        if trace is None or not self._watchers:
            return
        step = None
        if trace.decodes or trace.prompts:
            self._num_steps += 1
            seconds, preemptions = report.step.step_seconds, report.step.preemptions
            step = Step(self._num_steps, seconds, trace.decodes, trace.prompts, preemptions)
        for watcher in self._watchers:
            watcher.push(step, report.scheduler, trace)

    def close(self) -> None:
        """End all watches, including later ones."""
        self._is_closed = True
        for watcher in self._watchers:
            watcher.woken.set()

    async def watch(
        self, switch: Callable[[bool], None], batch_seconds: float = _BATCH_SECONDS
    ) -> AsyncGenerator[Update]:
        """Yield updates until the feed is closed.

        Args:
            switch: called with True when a watch begins, and with False when the last one has ended.
            batch_seconds: least time between two updates.

        Raises:
            APIError: before the first update, if there are too many watchers.
        """
        if len(self._watchers) >= _MOST_WATCHERS:
            raise APIError(503, "too many watchers: close another page", code="too_many_watchers")
        watcher = _Watcher()
        self._watchers.add(watcher)
        # Sent for every watch: the engine replies with a report, which is the watcher's first update.
        switch(True)
        try:
            while not self._is_closed:
                await watcher.woken.wait()
                watcher.woken.clear()
                update = watcher.take()
                if update is not None:
                    yield update
                    await asyncio.sleep(batch_seconds)
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                switch(False)


class _Watcher:
    """Updates that one watcher has not read yet."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self._steps: deque[Step] = deque(maxlen=_MOST_PENDING)
        self._num_dropped = 0
        self._latest: tuple[SchedulerStats, StepTrace] | None = None

    def push(self, step: Step | None, state: SchedulerStats, trace: StepTrace) -> None:
        if step is not None:
            self._num_dropped += len(self._steps) == _MOST_PENDING
            self._steps.append(step)
        self._latest = state, trace
        self.woken.set()

    def take(self) -> Update | None:
        if self._latest is None:
            return None
        state, trace = self._latest
        update = Update(list(self._steps), self._num_dropped, asdict(state), trace.queue, trace.blocks)
        self._steps.clear()
        self._num_dropped, self._latest = 0, None
        return update
