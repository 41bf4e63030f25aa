"""This project's operator: its own autoscaling code, fed with simulated scrapes."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.autoscaling.replica import ReplicaMetrics
from benchmarks.autoscaling.simulation import View
from fastgen_operator.autoscale.observation import Fleet, Sample
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.recommend import State, recommend


@dataclass(slots=True)
class Tokens:
    """The operator's policy with the user's targets and bounds."""

    rules: Policy
    _state: State = field(default_factory=State)
    _samples: dict[str, Sample] = field(default_factory=dict)

    @property
    def period(self) -> float:
        """Scrape interval in seconds."""
        return self.rules.scrape_seconds

    def observe(self, view: View) -> int:
        """Make a decision from one scrape."""
        self._samples = {pod: sample for pod, sample in self._samples.items() if pod in view.ready}
        self._samples |= {metrics.pod: sample_of(metrics) for metrics in view.replicas}
        fleet = Fleet(
            replicas=view.desired_replicas,
            ready=view.ready,
            samples=self._samples,
            pending_ages=view.pending_ages,
            terminating=view.terminating,
            start_seconds=view.start_seconds,
        )
        decision, self._state = recommend(self.rules, self._state, fleet, view.now)
        return decision.replicas


def sample_of(metrics: ReplicaMetrics) -> Sample:
    """Return the operator's sample for a scrape."""
    return Sample(
        time=metrics.time,
        prefill_tokens=metrics.scheduled_prefill_tokens,
        decode_tokens=metrics.scheduled_decode_tokens,
        ended_requests=metrics.ended,
        ended_prompt_tokens=metrics.ended_prompt_tokens,
        ended_generated_tokens=metrics.ended_generated_tokens,
        rejected_requests=metrics.rejected,
        backlog_tokens=metrics.backlog_prompt_tokens,
        running=metrics.running,
        waiting=metrics.waiting,
        kv_used=min(1.0, metrics.kv_tokens / metrics.kv_capacity_tokens),
        kv_capacity_tokens=metrics.kv_capacity_tokens,
        kv_tokens=metrics.kv_tokens,
        token_budget=metrics.token_budget,
        step_model=metrics.step_model,
    )
