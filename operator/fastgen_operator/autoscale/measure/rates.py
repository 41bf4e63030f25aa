"""Token rates of a replica between two scrapes, and the mean request. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fastgen_operator.autoscale.sample import Sample

# The mean request covers about this many finished requests.
_REQUEST_MEMORY: Final = 200
# A replica is backlogged with more than this many full steps of prompt tokens queued. With fewer, the engine shortens
# steps to keep its latency, so throughput says nothing about capacity (docs/decisions/005).
_BACKLOG_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one replica between two scrapes, in tokens per second unless noted.

    Attributes:
        seconds: length of the interval; 0 for a replica's first sample.
        admitted: prompt tokens of admitted requests, cancelled ones included.
        rejected: prompt tokens of requests that the full queue rejected.
        computed, cached: prompt tokens computed, and taken from the prefix cache.
        decoded: generated tokens.
        ended, ended_prompt, ended_generated: requests that ended with at least one token, and their tokens (totals,
            not rates). Their number is estimated from the share of cancelled prompt tokens.
        backlogged: whether a backlog existed at both ends of the interval.
    """

    seconds: float = 0.0
    admitted: float = 0.0
    rejected: float = 0.0
    computed: float = 0.0
    cached: float = 0.0
    decoded: float = 0.0
    ended: float = 0.0
    ended_prompt: float = 0.0
    ended_generated: float = 0.0
    backlogged: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The newest sample of one replica, and its rates in the interval before it.

    It is not part of `Pod`: it comes from the engine's metrics, outlives versions of the pod's object, and is recorded
    in the journal.
    """

    sample: Sample
    rates: Rates = Rates()


def load_after(before: ReplicaLoad | None, sample: Sample) -> ReplicaLoad:
    """Return the load after a sample; `before` is the load until then, if any."""
    if before is None:
        return ReplicaLoad(sample)
    if sample.time <= before.sample.time:
        return before
    return ReplicaLoad(sample, rates_between(before.sample, sample))


def rates_between(before: Sample, after: Sample) -> Rates:
    """Return the rates between two samples. A token counter that decreased means an engine restart."""
    restarted = (
        after.arrived_tokens < before.arrived_tokens
        or after.prefill_tokens < before.prefill_tokens
        or after.decode_tokens < before.decode_tokens
    )
    start = Sample(time=before.time) if restarted else before
    seconds = after.time - before.time
    rejected = _growth(start.rejected_tokens, after.rejected_tokens)
    ended_prompt = _growth(start.ended_prompt_tokens, after.ended_prompt_tokens)
    cancelled = _growth(start.cancelled_tokens, after.cancelled_tokens)
    # Exclude requests that were cancelled before their first token: they generate fewer tokens than others.
    served = 1 - min(1.0, cancelled / ended_prompt) if ended_prompt > 0 else 0.0
    return Rates(
        seconds=seconds,
        admitted=_growth(rejected, _growth(start.arrived_tokens, after.arrived_tokens)) / seconds,
        rejected=rejected / seconds,
        computed=_growth(start.prefill_tokens, after.prefill_tokens) / seconds,
        cached=_growth(start.cached_tokens, after.cached_tokens) / seconds,
        decoded=_growth(start.decode_tokens, after.decode_tokens) / seconds,
        ended=_growth(start.ended_requests, after.ended_requests) * served,
        ended_prompt=ended_prompt * served,
        ended_generated=_growth(start.ended_generated_tokens, after.ended_generated_tokens),
        backlogged=0 < _BACKLOG_STEPS * after.token_budget < min(before.backlog_tokens, after.backlog_tokens),
    )


def _growth(before: float, after: float) -> float:
    return after - before if after > before else 0.0


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The mean request: prompt tokens computed, prompt tokens in total, and tokens generated."""

    computed: float
    prompt: float
    generated: float


# A typical chat request, assumed until requests have finished.
DEFAULT_SHAPE: Final = RequestShape(computed=512.0, prompt=512.0, generated=128.0)


@dataclass(frozen=True, slots=True)
class RequestSums:
    """Exponentially weighted sums, which give the mean request. They decay with each finished request.

    Attributes:
        ended, prompt, generated: finished requests, and their prompt and generated tokens.
        computed, cached: prompt tokens computed and taken from the prefix cache, of unfinished requests, too. Only
            their ratio is used.
    """

    ended: float = 0.0
    prompt: float = 0.0
    generated: float = 0.0
    computed: float = 0.0
    cached: float = 0.0

    def add(self, intervals: Iterable[Rates]) -> RequestSums:
        """Return the sums after these intervals."""
        intervals = tuple(intervals)
        ended = sum(rates.ended for rates in intervals)
        keep = math.exp(-ended / _REQUEST_MEMORY)
        return RequestSums(
            self.ended * keep + ended,
            self.prompt * keep + sum(rates.ended_prompt for rates in intervals),
            self.generated * keep + sum(rates.ended_generated for rates in intervals),
            self.computed * keep + sum(rates.computed * rates.seconds for rates in intervals),
            self.cached * keep + sum(rates.cached * rates.seconds for rates in intervals),
        )

    @property
    def mean(self) -> RequestShape:
        """The mean request; `DEFAULT_SHAPE` until one has finished."""
        if self.ended <= 0 or self.prompt <= 0:
            return DEFAULT_SHAPE
        prompt = self.prompt / self.ended
        return RequestShape(prompt * self.computed_share, prompt, self.generated / self.ended)

    @property
    def computed_share(self) -> float:
        """Share of prompt tokens that is computed, instead of taken from the prefix cache; 1 while unknown."""
        known = self.computed + self.cached
        return self.computed / known if known > 0 else 1.0

    @property
    def work_per_prompt_token(self) -> float:
        """Forward tokens per prompt token: the computed share, plus the generated tokens per prompt token."""
        shape = self.mean
        return self.computed_share + shape.generated / shape.prompt
