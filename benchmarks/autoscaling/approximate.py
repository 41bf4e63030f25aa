"""A replica that approximates the engine arithmetically, at the cost of a few operations per step.

The real scheduler iterates over all sequences in every step. Here a step only knows the number of decoding sequences,
their resident tokens and the next prompt, and steps without prompt tokens are processed in batches. The step loop is
compiled: `benchmarks.autoscaling.steps`. It runs when someone looks, up to the latest time given: adding a request only
queues it. The fit of the step model is the engine's own, of a sample of the steps, to times with a measurement error.
Not modelled: partly filled blocks, and preemption: a full cache admits nothing. In the prefix cache, the blocks of a
prompt appear all at once, with its first token.
`tests/operator/autoscale/test_simulator.py` compares it with the real scheduler.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from benchmarks.autoscaling import steps
from benchmarks.autoscaling.replica import TOLERANCE, Arrival, Engine, ReplicaMetrics, RequestLog
from benchmarks.autoscaling.steps import ANSWERED, BLOCK, DECODING, LOST, NUM_LISTS, PARTIAL, REQUEST, STATE, WAITING
from fastgen.core.step_model import StepModel
from fastgen.core.step_times import StepCoefficients, StepWork

_STEP_ERROR = 0.05  # largest relative error of a measured step
_ROWS = 64  # initial size of the table of requests


class ApproximateReplica:
    """An approximate engine: see `benchmarks.autoscaling.replica.Replica`."""

    def __init__(self, engine: Engine, log: RequestLog, now: float) -> None:
        device = engine.device
        self._log = log
        self._step_model = StepModel()
        self._errors = random.Random(now)
        self._states = np.zeros(1, STATE)
        self._state: Any = self._states[0]
        settings = {
            **device.coefficients._asdict(),
            "gap": engine.targets.gap,
            "limit": engine.targets.gap * TOLERANCE,
            "patience": engine.patience,
            "token_budget": device.token_budget,
            "max_sequences": device.max_sequences,
            "kv_capacity": device.kv_tokens,
            "max_queued": engine.max_queued,
            "clock": now,
        }
        for name, value in settings.items():
            self._states[name] = value
        self._table = np.zeros(_ROWS, REQUEST)
        self._lists = np.zeros((NUM_LISTS, _ROWS), np.int64)
        self._arrivals: list[Arrival] = []  # by row
        self._copied = 0  # of them in the table
        self._has_cache = engine.prefix_cache
        self._numbers: dict[int, int] = {}  # rows of blocks
        self._blocks = np.zeros(1, BLOCK)
        self._chains = np.zeros(_ROWS, np.int64)
        self._num_chained = 0
        self._ended: list[Arrival] = []
        self._now = self._seen = now

    @property
    def in_flight(self) -> int:
        """Number of unfinished requests."""
        self._advance()
        num = self._state["num"]
        return int(num[WAITING] + num[PARTIAL] + num[DECODING])

    @property
    def backlog(self) -> int:
        """Prompt tokens not yet computed."""
        self._advance()
        return int(self._state["pending"])

    def add(self, arrival: Arrival) -> None:
        """Queue or reject a request."""
        self._arrivals.append(arrival)

    def run_until(self, now: float) -> None:
        """Run all steps that start before `now`, before anything is read of this replica."""
        self._now = max(self._now, now)

    def drain(self, deadline: float) -> float:
        """Finish all requests or abort them at `deadline`."""
        self._advance()
        steps.drain(self._states, self._table, self._lists, self._chains, self._blocks, deadline)
        self._report_lost()
        done = self._table[: self._copied]
        served = np.flatnonzero(done["end"])
        columns = (done[name][served].tolist() for name in ("first", "end", "met"))
        for row, first, end, met in zip(served.tolist(), *columns, strict=True):
            self._log.served.append((self._arrivals[row].begun, first, end, bool(met)))
            self._log.prompts.append((self._arrivals[row].begun, self._arrivals[row].prompt, int(done["hit"][row])))
        done["end"] = 0.0
        self._log.gaps += int(self._state["gaps"])
        self._log.late_gaps += int(self._state["late_gaps"])
        self._state["gaps"] = self._state["late_gaps"] = 0
        return min(float(self._state["clock"]), deadline)

    def metrics(self, pod: str, now: float) -> ReplicaMetrics:
        """Return what a scrape returns."""
        self._advance()
        steps.cancel(self._states, self._table, self._lists, now)
        self._report_lost()
        s = dict(zip(STATE.names or (), self._state.tolist(), strict=True))
        waiting, partial, decoding, *_ = s["num"].tolist() if isinstance(s["num"], np.ndarray) else s["num"]
        return ReplicaMetrics(
            pod=pod,
            time=now,
            running=partial + decoding,
            waiting=waiting,
            kv_tokens=s["kv_tokens"],
            kv_capacity_tokens=s["kv_capacity"],
            token_budget=s["token_budget"],
            max_sequences=s["max_sequences"],
            backlog_prompt_tokens=s["pending"],
            oldest_waiting_seconds=max(0.0, now - self._table[self._lists[WAITING, 0]]["time"]) if waiting else 0.0,
            fit=self._fit,
            scheduled_prefill_tokens=s["prefilled"],
            scheduled_decode_tokens=s["decoded"],
            steps=s["steps"],
            step_seconds=s["step_seconds"],
            ended=s["ended"],
            ended_prompt_tokens=s["ended_prompt"],
            ended_generated_tokens=s["ended_generated"],
            rejected=s["rejected"],
            arrived_prompt_tokens=s["arrived_tokens"],
            rejected_prompt_tokens=s["rejected_tokens"],
            cancelled_prompt_tokens=s["cancelled_tokens"],
            cached_prompt_tokens=s["cached_tokens"],
        )

    def ended(self) -> list[Arrival]:
        """Return the requests that ended since the last call."""
        self._advance()
        num = self._state["num"]
        ended = self._ended + [self._arrivals[row] for row in self._lists[ANSWERED, : num[ANSWERED]].tolist()]
        num[ANSWERED], self._ended = 0, []
        return ended

    def _advance(self) -> None:
        """Let the requests enter that were added, and run until the latest time given."""
        added = len(self._arrivals)
        if self._seen == self._now and self._copied == added:
            return
        if added > len(self._table):
            size = 2 * added
            table, lists = np.zeros(size, REQUEST), np.zeros((NUM_LISTS, size), np.int64)
            table[: self._copied] = self._table[: self._copied]
            lists[:, : self._lists.shape[1]] = self._lists
            self._table, self._lists = table, lists
        if added > self._copied:
            new, rows = self._arrivals[self._copied :], self._table[self._copied : added]
            rows["time"] = [arrival.time for arrival in new]
            rows["prompt"] = [arrival.prompt for arrival in new]
            rows["generate"] = [arrival.generate for arrival in new]
            if self._has_cache:
                self._chain(new, rows)
            self._copied = added
        steps.run(self._states, self._table, self._lists, self._chains, self._blocks, added, self._now)
        self._seen = self._now
        self._report_lost()

    def _chain(self, arrivals: list[Arrival], rows: Any) -> None:
        """Note the blocks of requests that enter."""
        lengths = [len(arrival.blocks) for arrival in arrivals]
        rows["blocks"] = lengths
        rows["chain"] = self._num_chained + np.cumsum([0, *lengths[:-1]])
        numbers = [self._numbers.setdefault(b, len(self._numbers) + 1) for arrival in arrivals for b in arrival.blocks]
        end = self._num_chained + len(numbers)
        if end > len(self._chains):
            self._chains = np.concatenate([self._chains, np.zeros(2 * end - len(self._chains), np.int64)])
        self._chains[self._num_chained : end] = numbers
        self._num_chained = end
        if (missing := len(self._numbers) + 1 - len(self._blocks)) > 0:
            self._blocks = np.concatenate([self._blocks, np.zeros(len(self._blocks) + missing, BLOCK)])

    def _report_lost(self) -> None:
        num = self._state["num"]
        for row in self._lists[LOST, : num[LOST]].tolist():
            self._log.lose(self._arrivals[row])
            self._ended.append(self._arrivals[row])
        num[LOST] = 0

    def _fit(self) -> StepCoefficients:
        for *work, seconds in self._state["observed"][: self._state["num_observed"]].tolist():
            error = 1 + _STEP_ERROR * self._errors.uniform(-1, 1)
            self._step_model.observe(StepWork(*map(int, work)), error * seconds)
        self._state["num_observed"] = 0
        return self._step_model.coefficients
