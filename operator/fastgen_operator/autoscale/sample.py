"""The inputs of a decision: scraped metrics of each replica, the pods of a fleet, and what the gateway says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

# The name of a metric without the prefix fastgen_, and the value of its label besides model_name; empty without one.
Metric = tuple[str, str]

# A sample is stale when it is older than this many scrape intervals.
MISSED_SCRAPES = 3


class StepCoefficients(NamedTuple):
    """Coefficients of an engine's step time, in seconds; zeros until the engine has fitted them.

    A step takes base + token · tokens + kv_token · resident KV tokens + context_pair · the sum over prompt chunks of
    (tokens - 1) · tokens before the chunk.

    Attributes:
        context_pair: 0 for engines that do not report it.
    """

    base: float = 0.0
    token: float = 0.0
    kv_token: float = 0.0
    context_pair: float = 0.0


def _metric(name: str, label: str = "") -> Any:
    """Return a field of `Sample` that a scraped metric sets."""
    return field(default=0.0, metadata={"metric": (name, label)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One valid scrape of one replica. All values are finite and not negative.

    Attributes:
        time: monotonic time of the scrape in seconds.
        arrived_tokens: counter of prompt tokens of valid requests, admitted or rejected.
        rejected_tokens: counter of prompt tokens of requests that the full queue rejected, each assumed to be as long
            as the mean admitted prompt.
        cancelled_tokens: counter of prompt tokens of requests that disconnected or timed out before their first token.
        prefill_tokens, decode_tokens: counters of forward tokens, by phase.
        cached_tokens: counter of prompt tokens taken from the prefix cache.
        ended_requests, ended_prompt_tokens, ended_generated_tokens: counters of finished requests and their tokens,
            cancelled requests included.
        backlog_tokens: prompt tokens not yet computed.
        running: sequences that hold KV cache blocks.
        waiting: queued sequences, without those that are swapped out.
        kv_used: used share of the KV cache, 0 to 1.
        kv_capacity_tokens: capacity of the KV cache in tokens.
        kv_tokens: resident tokens of the running sequences.
        token_budget: maximum forward tokens per step.
        step_model: the engine's fit of its step times.
    """

    time: float
    arrived_tokens: float = _metric("arrived_prompt_tokens_total")
    rejected_tokens: float = _metric("rejected_prompt_tokens_total")
    cancelled_tokens: float = _metric("cancelled_prompt_tokens_total")
    prefill_tokens: float = _metric("scheduled_tokens_total", "prefill")
    decode_tokens: float = _metric("scheduled_tokens_total", "decode")
    cached_tokens: float = _metric("prefix_cache_hit_tokens_total")
    ended_requests: float = _metric("request_prompt_tokens_count")
    ended_prompt_tokens: float = _metric("request_prompt_tokens_sum")
    ended_generated_tokens: float = _metric("request_generation_tokens_sum")
    backlog_tokens: float = _metric("backlog_prompt_tokens")
    running: float = _metric("num_requests_running")
    waiting: float = _metric("num_requests_waiting")
    kv_used: float = _metric("kv_cache_usage_ratio")
    kv_capacity_tokens: float = _metric("kv_cache_capacity_tokens")
    kv_tokens: float = _metric("kv_cache_tokens")
    token_budget: float = _metric("token_budget")
    step_model: StepCoefficients = field(default=StepCoefficients())

    @property
    def in_flight_tokens(self) -> float:
        """Resident tokens of the running sequences, plus prompt tokens not yet computed."""
        return self.kv_tokens + self.backlog_tokens


SAMPLE_METRICS: Final[Mapping[Metric, str]] = {
    each.metadata["metric"]: each.name for each in fields(Sample) if "metric" in each.metadata
}
"""The field of `Sample` that each scraped metric sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The pods of one FastGenDeployment at one moment. Only ready and starting pods are supply.

    Attributes:
        replicas: number of replicas that the last reconcile wanted.
        ready: names of the pods that are ready and not draining.
        samples: newest valid sample of each ready pod that has one.
        revisions: pod template hash of each ready pod.
        starting: for each starting pod, how many seconds of its start have passed.
        failing: number of failing or lost pods, which count as replicas and do not serve.
        without_room: number of pods for which the only node that they may run on has no room.
        start_seconds: learned time from the assignment of a node to ready; None if unknown.
    """

    replicas: int
    ready: frozenset[str]
    samples: Mapping[str, Sample] = field(default_factory=dict)
    revisions: Mapping[str, str] = field(default_factory=dict)
    starting: tuple[float, ...] = ()
    failing: int = 0
    without_room: int = 0
    start_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the pods of the gateway say about a deployment.

    Attributes:
        held: requests that wait for a ready replica, at the pods that answered.
        idle_seconds: time since the last request for it arrived or ended at one of the pods; None unless all pods, and
            at least one, have answered.
        fault: why that is not known; empty if it is.
    """

    held: int = 0
    idle_seconds: float | None = None
    fault: str = ""
