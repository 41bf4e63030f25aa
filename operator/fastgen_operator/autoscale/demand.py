"""What work arrives, from how the replicas' counters grow. Pure.

Counters of what was served cannot show more than the fleet's capacity. What arrives is what was computed plus what the
backlog grew by, and that has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from fastgen_operator.autoscale.averages import Average
from fastgen_operator.autoscale.capacity import USUAL_SHAPE, RequestShape
from fastgen_operator.autoscale.observation import MISSED_SCRAPES, Fleet, Sample

# Seconds of memory: of the rate that the fleet is sized by, and of the one that tells a sudden jump.
SLOW_SECONDS: Final = 30.0
FAST_SECONDS: Final = 10.0
# The mean request is that of about this many of the last ones that ended.
_REQUESTS_REMEMBERED: Final = 200
# Throughput is taken for the capacity while more than this many full passes wait: with fewer, the engine makes passes
# shorter than the budget for the sake of its latency (docs/decisions/005).
_PASSES_OF_BACKLOG: Final = 8
# What was seen under a backlog: seconds of memory, and after how many without one it is not believed any more.
_OBSERVED_SECONDS: Final = 60.0
_OBSERVED_HOLDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Flow:
    """What one replica did between two scrapes, tokens a second but for what is named otherwise.

    Attributes:
        arriving: prompt tokens that came, whether computed, taken from the prefix cache, or waiting now.
        computed: prompt tokens computed; `cached`: taken from the prefix cache; `decoded`: tokens generated.
        rejected: requests refused a second.
        ended, ended_prompt, ended_generated: requests that ended in the interval, and their tokens in all.
        backlogged: whether it had a backlog to draw on all the time.
    """

    seconds: float
    arriving: float
    computed: float
    cached: float
    decoded: float
    rejected: float
    ended: float
    ended_prompt: float
    ended_generated: float
    backlogged: bool


# A replica that has just become ready: what it did before it could be asked is nothing.
_IDLE: Final = Flow(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, False)


@dataclass(frozen=True, slots=True)
class Track:
    """One replica as it was last seen: its newest sample, and its flow until then."""

    sample: Sample
    flow: Flow


@dataclass(frozen=True, slots=True)
class Shape:
    """Sums over the last requests, from which the mean one follows."""

    ended: float = 0.0
    prompt: float = 0.0
    generated: float = 0.0
    computed: float = 0.0
    cached: float = 0.0

    def add(self, flows: Iterable[Flow]) -> Shape:
        """With what ended meanwhile."""
        flows = tuple(flows)
        ended = sum(flow.ended for flow in flows)
        keep = math.exp(-ended / _REQUESTS_REMEMBERED)
        return Shape(
            self.ended * keep + ended,
            self.prompt * keep + sum(flow.ended_prompt for flow in flows),
            self.generated * keep + sum(flow.ended_generated for flow in flows),
            self.computed * keep + sum(flow.computed * flow.seconds for flow in flows),
            self.cached * keep + sum(flow.cached * flow.seconds for flow in flows),
        )

    @property
    def mean(self) -> RequestShape:
        """The mean request; a usual one until one has ended."""
        if self.ended <= 0 or self.prompt <= 0:
            return USUAL_SHAPE
        prompt = self.prompt / self.ended
        return RequestShape(prompt * self.computed_share, prompt, self.generated / self.ended)

    @property
    def computed_share(self) -> float:
        """The share of prompt tokens that is not taken from the prefix cache."""
        known = self.computed + self.cached
        return self.computed / known if known > 0 else 1.0

    @property
    def work_per_prompt_token(self) -> float:
        """Forward tokens that follow from one prompt token: its share of computing, and the tokens it brings about."""
        shape = self.mean
        return self.computed_share + shape.generated / shape.prompt


@dataclass(frozen=True, slots=True)
class Demand:
    """What arrives at a fleet, forward tokens a second.

    Attributes:
        tracks: the ready replicas that ever said something, by pod.
        first_seen: when each ready replica was first seen, by pod.
        slow, fast: the rate smoothed over `SLOW_SECONDS` and `FAST_SECONDS`.
        shape: the last requests.
        backlogged: throughput of one replica while it was backlogged; `backlogged_at`: when one last was.
        time: when a rate was last taken in.
    """

    tracks: Mapping[str, Track]
    first_seen: Mapping[str, float]
    slow: Average = field(default_factory=lambda: Average(SLOW_SECONDS))
    fast: Average = field(default_factory=lambda: Average(FAST_SECONDS))
    shape: Shape = field(default_factory=Shape)
    backlogged: Average = field(default_factory=lambda: Average(_OBSERVED_SECONDS))
    backlogged_at: float = -math.inf
    time: float = -math.inf

    @property
    def is_known(self) -> bool:
        """Whether any rate was taken in."""
        return self.slow.weight > 0

    def observed(self, now: float) -> float | None:
        """The throughput of one replica under a backlog; None where that was too long ago."""
        return self.backlogged.value if now - self.backlogged_at < _OBSERVED_HOLDS else None

    def fresh(self, fleet: Fleet, now: float, scrape_seconds: float) -> dict[str, Track]:
        """The ready replicas whose word still holds."""
        oldest = now - MISSED_SCRAPES * scrape_seconds
        return {
            name: track for name, track in self.tracks.items() if name in fleet.ready and track.sample.time >= oldest
        }

    def newcomers(self, fleet: Fleet, now: float, scrape_seconds: float) -> int:
        """Ready replicas that have not had the time to say anything: they are taken to do nothing yet."""
        latest = now - MISSED_SCRAPES * scrape_seconds
        return sum(name not in self.tracks and self.first_seen[name] > latest for name in fleet.ready)

    def observe(self, fleet: Fleet, now: float, scrape_seconds: float) -> Demand:
        """Takes in what the replicas said since the last time."""
        tracks = {
            name: _track(self.tracks.get(name), fleet.samples[name]) for name in fleet.ready if name in fleet.samples
        }
        first_seen = {name: self.first_seen.get(name, now) for name in fleet.ready}
        after = replace(self, tracks=tracks, first_seen=first_seen)
        flows = [track.flow for track in after.fresh(fleet, now, scrape_seconds).values()]
        if not any(flow.seconds for flow in flows):
            return after
        new = [track.flow for name, track in tracks.items() if self.tracks.get(name) is not track]
        shape = self.shape.add(new)
        # Replicas that say nothing are taken to bear the mean load of the others.
        bearing = len(fleet.ready) - after.newcomers(fleet, now, scrape_seconds)
        arriving = sum(_arriving(flow, shape) for flow in flows) * bearing / len(flows)
        rate = max(0.0, arriving) * shape.work_per_prompt_token
        seconds = now - self.time if self.is_known else scrape_seconds
        after = replace(
            after, slow=self.slow.add(rate, seconds), fast=self.fast.add(rate, seconds), shape=shape, time=now
        )
        return _see_throughput(after, [flow for flow in new if flow.backlogged], now)


def _see_throughput(demand: Demand, busy: list[Flow], now: float) -> Demand:
    if not busy:
        return demand
    throughput = sum(flow.computed + flow.decoded for flow in busy) / len(busy)
    backlogged = demand.backlogged.add(throughput, max(flow.seconds for flow in busy))
    return replace(demand, backlogged=backlogged, backlogged_at=now)


def _track(before: Track | None, sample: Sample) -> Track:
    if before is None:
        return Track(sample, _IDLE)
    if sample.time <= before.sample.time:
        return before
    return Track(sample, flow_between(before.sample, sample))


def flow_between(before: Sample, after: Sample) -> Flow:
    """The flow between two samples of one replica. Counters that fell began anew: the engine was started again."""
    restarted = after.prefill_tokens < before.prefill_tokens or after.decode_tokens < before.decode_tokens
    start = Sample(time=before.time) if restarted else before
    seconds = after.time - before.time

    def growth(counter: str) -> float:
        return max(0.0, float(getattr(after, counter)) - float(getattr(start, counter)))

    computed, cached = growth("prefill_tokens"), growth("cached_tokens")
    enough = _PASSES_OF_BACKLOG * after.token_budget
    return Flow(
        seconds=seconds,
        arriving=(computed + cached + after.backlog_tokens - start.backlog_tokens) / seconds,
        computed=computed / seconds,
        cached=cached / seconds,
        decoded=growth("decode_tokens") / seconds,
        rejected=growth("rejected_requests") / seconds,
        ended=growth("ended_requests"),
        ended_prompt=growth("ended_prompt_tokens"),
        ended_generated=growth("ended_generated_tokens"),
        backlogged=0 < enough < min(before.backlog_tokens, after.backlog_tokens),
    )


def _arriving(flow: Flow, shape: Shape) -> float:
    """Prompt tokens a second, those of refused requests with it.

    Who is refused comes again: the refused count for no more than those that were let in.
    """
    refused = flow.rejected * shape.mean.prompt
    return flow.arriving + min(refused, max(0.0, flow.arriving))
