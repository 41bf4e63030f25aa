"""What a decision is based on: the scraped metrics of each replica, and the pods of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

# The name of a metric without the prefix fastgen_, and the value of its label besides model_name.
Metric = tuple[str, str]

# A sample is stale when it is older than this many scrape intervals.
MISSED_SCRAPES = 3

SAMPLE_METRICS: Final[Mapping[Metric, str]] = {
    ("arrived_prompt_tokens_total", ""): "arrived_tokens",
    ("rejected_prompt_tokens_total", ""): "rejected_tokens",
    ("cancelled_prompt_tokens_total", ""): "cancelled_tokens",
    ("scheduled_tokens_total", "prefill"): "prefill_tokens",
    ("scheduled_tokens_total", "decode"): "decode_tokens",
    ("prefix_cache_hit_tokens_total", ""): "cached_tokens",
    ("request_prompt_tokens_count", ""): "ended_requests",
    ("request_prompt_tokens_sum", ""): "ended_prompt_tokens",
    ("request_generation_tokens_sum", ""): "ended_generated_tokens",
    ("backlog_prompt_tokens", ""): "backlog_tokens",
    ("num_requests_running", ""): "running",
    ("num_requests_waiting", ""): "waiting",
    ("kv_cache_usage_ratio", ""): "kv_used",
    ("kv_cache_capacity_tokens", ""): "kv_capacity_tokens",
    ("kv_cache_tokens", ""): "kv_tokens",
    ("token_budget", ""): "token_budget",
}
"""The field of `Sample` that each scraped metric sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One valid scrape of one replica. All values are finite and not negative.

    Attributes:
        time: monotonic time of the scrape in seconds.
        arrived_tokens: counter of prompt tokens of valid requests, admitted or rejected.
        rejected_tokens: counter of prompt tokens of requests that the full queue rejected.
        cancelled_tokens: counter of prompt tokens of requests that ended before their first token.
        prefill_tokens, decode_tokens: counters of forward tokens.
        cached_tokens: counter of prompt tokens taken from the prefix cache.
        ended_requests, ended_prompt_tokens, ended_generated_tokens: counters of finished requests and their tokens,
            cancelled requests included.
        backlog_tokens: prompt tokens not yet computed.
        running, waiting: sequences with and without KV cache.
        kv_used: used share of the KV cache, 0 to 1.
        kv_capacity_tokens: capacity of the KV cache in tokens.
        kv_tokens: resident tokens of the running sequences.
        token_budget: maximum forward tokens per step.
        step_model: (a, b, c) of the step time a + b · tokens + c · resident KV tokens in seconds; zeros until fitted.
    """

    time: float
    arrived_tokens: float = 0.0
    rejected_tokens: float = 0.0
    cancelled_tokens: float = 0.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    cached_tokens: float = 0.0
    ended_requests: float = 0.0
    ended_prompt_tokens: float = 0.0
    ended_generated_tokens: float = 0.0
    backlog_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv_used: float = 0.0
    kv_capacity_tokens: float = 0.0
    kv_tokens: float = 0.0
    token_budget: float = 0.0
    step_model: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def in_flight_tokens(self) -> float:
        """Tokens in the KV cache, and prompt tokens not yet computed."""
        return self.kv_tokens + self.backlog_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The pods of one FastGenDeployment at one moment. Only ready and starting pods are supply.

    Attributes:
        replicas: current `spec.replicas` of the Deployment.
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
