"""What is known of a fleet at one moment: what its replicas' metrics said, and how many pods there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# A replica whose last usable answer is older than this many scrapes says nothing any more.
MISSED_SCRAPES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One usable scrape of one replica. All values are finite and not negative.

    Attributes:
        time: when it was, in seconds on the caller's monotonic clock.
        prefill_tokens, decode_tokens: forward tokens so far (`scheduled_tokens_total`).
        cached_tokens: prompt tokens so far that came from the prefix cache instead.
        ended_requests, ended_prompt_tokens, ended_generated_tokens: requests so far that ended, and their tokens.
        rejected_requests: requests so far that were refused because the queue was full.
        backlog_tokens: prompt tokens not yet computed.
        running, waiting: sequences that hold KV cache, and that do not.
        kv_used: share of the KV cache in use, 0 to 1.
        kv_capacity_tokens: tokens that the KV cache holds.
        kv_tokens: tokens of the sequences that are running.
        token_budget: forward tokens of a pass, at most.
        step_model: (a, b, c) of a pass's seconds a + b · tokens + c · resident KV tokens; zeros while not fitted.
    """

    time: float
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    cached_tokens: float = 0.0
    ended_requests: float = 0.0
    ended_prompt_tokens: float = 0.0
    ended_generated_tokens: float = 0.0
    rejected_requests: float = 0.0
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
        """Tokens of running and waiting requests: in the KV cache, and prompt tokens still to compute."""
        return self.kv_tokens + self.backlog_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The pods of one FastGenDeployment at one moment.

    Attributes:
        wanted: replicas that the Deployment asks for now.
        ready: names of the pods that pass their readiness probe and are not being deleted.
        samples: the newest usable sample of each of them that ever gave one.
        pending_ages: seconds since creation of each pod that is on its way to be ready.
        terminating: pods that drain. They are no supply, and what they still do is no demand.
        start_seconds: how long a pod takes from creation to ready, where that was seen.
    """

    wanted: int
    ready: frozenset[str]
    samples: Mapping[str, Sample] = field(default_factory=dict)
    pending_ages: tuple[float, ...] = ()
    terminating: int = 0
    start_seconds: float | None = None

    @property
    def supply(self) -> int:
        """Pods that serve or will."""
        return len(self.ready) + len(self.pending_ages)
