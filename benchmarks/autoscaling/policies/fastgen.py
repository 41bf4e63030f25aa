"""This project's operator: its own code, fed with what it would scrape."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.autoscaling.replica import Reading
from benchmarks.autoscaling.simulation import View
from fastgen_operator.autoscale.observation import Fleet, Sample
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.recommend import State, recommend


@dataclass(slots=True)
class Tokens:
    """Ours; nothing but the user's targets and bounds is set."""

    rules: Policy
    _state: State = field(default_factory=State)
    _samples: dict[str, Sample] = field(default_factory=dict)

    @property
    def period(self) -> float:
        """Seconds between two scrapes."""
        return self.rules.scrape_seconds

    def observe(self, view: View) -> int:
        """One scrape and one decision."""
        self._samples = {pod: sample for pod, sample in self._samples.items() if pod in view.ready}
        self._samples |= {reading.pod: sample_of(reading) for reading in view.readings}
        fleet = Fleet(
            wanted=view.wanted,
            ready=view.ready,
            samples=self._samples,
            pending_ages=view.pending_ages,
            terminating=view.terminating,
            start_seconds=view.start_seconds,
        )
        decision, self._state = recommend(self.rules, self._state, fleet, view.now)
        return decision.replicas


def sample_of(reading: Reading) -> Sample:
    """What the operator makes of a scrape."""
    return Sample(
        time=reading.time,
        prefill_tokens=reading.scheduled_prefill_tokens,
        decode_tokens=reading.scheduled_decode_tokens,
        ended_requests=reading.ended,
        ended_prompt_tokens=reading.ended_prompt_tokens,
        ended_generated_tokens=reading.ended_generated_tokens,
        rejected_requests=reading.rejected,
        backlog_tokens=reading.backlog_prompt_tokens,
        running=reading.running,
        waiting=reading.waiting,
        kv_used=min(1.0, reading.kv_tokens / reading.kv_capacity_tokens),
        kv_capacity_tokens=reading.kv_capacity_tokens,
        kv_tokens=reading.kv_tokens,
        token_budget=reading.token_budget,
        step_model=reading.step_model,
    )
