"""Replay recorded arrivals with a policy and a fluid model of the fleet. Pure.

The policy's own rules decide, once a slot. The fleet is modelled as a fluid: a Service spreads the arriving tokens
evenly over the ready replicas, each of which computes at most its capacity, and no replica takes over the queue of
another. So replicas that became ready later have shorter queues; replicas with equal queues form a group.

In a group with utilization u and a queue of w seconds, requests of s seconds of work are in time for the first-token
target T unless their wait exceeds it. With the slack x = ((1 - u) T - w) / sqrt(2 s u T), the margin of
`rules/headroom.py` in standard deviations, the share of late requests is exp(-5.5 x^0.65). The two numbers are fitted
to constant fleets in the simulator (docs/decisions/067). Behind a longer queue, half of the requests that a full
replica can serve are in time: the engine gives half of each step to the shortest prompts (docs/decisions/022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from fastgen_operator.autoscale.measure.averages import Average
from fastgen_operator.autoscale.measure.capacity import MeasuredCapacity, ReplicaSpeeds
from fastgen_operator.autoscale.measure.demand import FAST_SECONDS, SLOW_SECONDS, Demand
from fastgen_operator.autoscale.measure.rates import ReplicaLoad, RequestSums
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS
from fastgen_operator.autoscale.rules.headroom import derived_utilization
from fastgen_operator.autoscale.rules.needs import required_replicas
from fastgen_operator.autoscale.rules.recommend import State, apply_needs
from fastgen_operator.autoscale.sample import Fleet, Sample

# The share of late requests is exp(-_STEEPNESS x^_EXPONENT) at a slack of x standard deviations.
_STEEPNESS: Final = 5.5
_EXPONENT: Final = 0.65
# Share of a full replica's requests that are in time whatever its queue.
_SHORTEST: Final = 0.5
# In seconds of work: the load of a fleet may be almost zero.
_LEAST_DEVIATION: Final = 1e-9
# Forward tokens per prompt token. Without this minimum it is 0 if all prompts are cached and nothing is generated.
_LEAST_WORK: Final = 1e-9
# Longest gap that is bridged with the last known rate. Its slots are not counted.
_BRIDGED_SLOTS: Final = 4
# Slots that are not counted after a longer gap: clients retry after an outage.
_SETTLING_SLOTS: Final = 20
# Minimum number of slots without late requests between two bursts.
_CALM_SLOTS: Final = 8
# A slot with a larger share of late requests belongs to a burst.
_LATE: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetModel:
    """What a replay needs to know about a fleet.

    Attributes:
        policy: the fleet's policy.
        tokens_per_second: capacity of a replica.
        start_seconds: time from a decision to a ready replica.
        requests: the mean request.
    """

    policy: Policy
    tokens_per_second: float
    start_seconds: float
    requests: RequestSums = field(default_factory=RequestSums)

    @property
    def request_seconds(self) -> float:
        """Work of the mean request in seconds of a replica."""
        shape = self.requests.mean
        return (shape.computed + shape.generated) / self.tokens_per_second

    @property
    def utilization(self) -> float:
        """The target utilization: the policy's, or the derived one."""
        policy = self.policy
        if not policy.derives_utilization:
            return policy.utilization
        return derived_utilization(self.requests.mean, self.tokens_per_second, policy.first_token_seconds)

    def with_bounds(self, least: int, most: int) -> FleetModel:
        """Return the model with other bounds on the replicas."""
        return replace(self, policy=replace(self.policy, min_replicas=least, max_replicas=most))

    def with_first_token(self, seconds: float) -> FleetModel:
        """Return the model with another first-token target."""
        return replace(self, policy=replace(self.policy, first_token_seconds=seconds))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a replay served the arrivals of a period.

    Attributes:
        tokens: forward tokens of the requests that arrived.
        in_time: those of the requests whose first token would have been in time.
        replica_seconds: cost.
        seconds: length of the period, without unknown slots.
        bursts: how often requests became late after two minutes without late ones.
    """

    tokens: float = 0.0
    in_time: float = 0.0
    replica_seconds: float = 0.0
    seconds: float = 0.0
    bursts: int = 0

    @property
    def attainment(self) -> float:
        """Share of the requests in time; 1 without requests."""
        return self.in_time / self.tokens if self.tokens > 0 else 1.0

    def gain(self, present: Outcome) -> float:
        """Return the share of the late requests of `present`, which has some, that this outcome serves in time."""
        return (self.attainment - present.attainment) / (1 - present.attainment)


@dataclass(slots=True)
class _Group:
    """Replicas with equal queues, of `backlog` forward tokens each."""

    replicas: int
    backlog: float


class FleetReplay:
    """A modelled fleet that serves one slot after the other.

    Attributes:
        replicas: number of replicas that the last decision wanted.
    """

    def __init__(self, model: FleetModel) -> None:
        self._model = model
        self._policy = replace(
            model.policy, utilization=model.utilization, derives_utilization=False, scrape_seconds=SLOT_SECONDS
        )
        self._request_seconds = model.request_seconds
        self._work_per_prompt_token = max(_LEAST_WORK, model.requests.work_per_prompt_token)
        self._speeds = ReplicaSpeeds(capacity=MeasuredCapacity(model.tokens_per_second, 1, "StepModel"))
        self._late_from = -_CALM_SLOTS
        self._slot = 0
        self.replicas = 0

    def begin(self, rate: float) -> None:
        """Start with ready replicas for the rate, without queues."""
        policy = self._policy
        fits = math.ceil(rate / (self._model.tokens_per_second * policy.utilization))
        self.replicas = policy.awake.within_bounds(max(fits, self.replicas))
        self._groups = [_Group(self.replicas, 0.0)]
        self._starting: list[float] = []
        self._slow = Average(SLOW_SECONDS, rate, 1.0)
        self._fast = Average(FAST_SECONDS, rate, 1.0)
        self._state = State(since=-math.inf, replicas=self.replicas)

    def bound(self, least: int) -> None:
        """Raise the lower bound to `least` replicas, up to the upper one; 0 for the policy's own."""
        least = self._model.policy.within_bounds(least)
        if least != self._policy.min_replicas:
            self._policy = replace(self._policy, min_replicas=least)

    def serve(self, rate: float) -> Outcome:
        """Serve a slot with arrivals of `rate` tokens per second, then decide."""
        now = float(self._slot * SLOT_SECONDS)
        self._join(now)
        paid = sum(group.replicas for group in self._groups) + len(self._starting)
        late = self._work(rate)
        self._decide(rate, now + SLOT_SECONDS)
        began = late > _LATE and self._slot - self._late_from >= _CALM_SLOTS
        if late > _LATE:
            self._late_from = self._slot
        self._slot += 1
        tokens = rate * SLOT_SECONDS
        return Outcome(tokens, tokens * (1 - late), float(paid * SLOT_SECONDS), float(SLOT_SECONDS), int(began))

    def _join(self, now: float) -> None:
        """Move the pods that have started to the ready replicas."""
        joining = sum(ready <= now for ready in self._starting)
        if joining:
            self._starting = [ready for ready in self._starting if ready > now]
            self._groups.append(_Group(joining, 0.0))

    def _work(self, rate: float) -> float:
        """Advance all queues by a slot; return the share of late requests."""
        ready, capacity = sum(group.replicas for group in self._groups), self._model.tokens_per_second
        if not ready or not rate:
            for group in self._groups:
                group.backlog = max(0.0, group.backlog - capacity * SLOT_SECONDS)
            return 1.0 if rate else 0.0
        utilization = rate / (ready * capacity)
        late = 0.0
        for group in self._groups:
            before = group.backlog / capacity
            after = max(0.0, before + (utilization - 1) * SLOT_SECONDS)
            late += group.replicas * self._late(utilization, before, after)
            group.backlog = after * capacity
        if len(self._groups) > 1 and not any(group.backlog for group in self._groups):
            self._groups = [_Group(ready, 0.0)]
        return late / ready

    def _late(self, utilization: float, before: float, after: float) -> float:
        """Return the share of late requests of a replica whose queue changes between two lengths, in seconds."""
        target = self._policy.first_token_seconds
        most = 1 - _SHORTEST / max(1.0, utilization)
        if utilization >= 1:
            return min(most, 1 - max(0.0, target - before) / max(target, after - before))
        slack = (1 - utilization) * target - (before + after) / 2
        if slack <= 0:
            return most
        deviation = max(_LEAST_DEVIATION, math.sqrt(2 * self._request_seconds * utilization * target))
        return min(most, math.exp(-_STEEPNESS * (slack / deviation) ** _EXPONENT))

    def _decide(self, rate: float, now: float) -> None:
        self._slow, self._fast = self._slow.add(rate, SLOT_SECONDS), self._fast.add(rate, SLOT_SECONDS)
        if self._is_calm():
            return
        model, policy = self._model, self._policy
        ready = sum(group.replicas for group in self._groups)
        backlog = sum(group.replicas * group.backlog for group in self._groups)
        demand = Demand({}, {}, self._slow, self._fast, model.requests, now)
        fleet = Fleet(
            replicas=self.replicas,
            ready=_names(ready),
            starting=tuple(max(0.0, model.start_seconds - (at - now)) for at in self._starting),
            start_seconds=model.start_seconds,
        )
        if ready:
            # One sample with the queues of all replicas: the rules add them up.
            sample = Sample(time=now, backlog_tokens=backlog / self._work_per_prompt_token)
            needs = required_replicas(fleet, demand, {"": ReplicaLoad(sample)}, 1, self._speeds, policy)
            decision, self._state = apply_needs(policy, self._state, fleet, needs, now)
            self._scale(decision.replicas, now)

    def _is_calm(self) -> bool:
        """Return whether the decision is certain: the lower bound runs, and the load requires no more.

        The policy then need not decide, unless it has a scale-up window, which remembers the lowest need.
        """
        policy = self._policy
        needed = max(self._slow.value, self._fast.value) / (self._model.tokens_per_second * policy.down_utilization)
        (first, *others) = self._groups or [_Group(0, 0.0)]
        is_least = not self._starting and not others and first.replicas == policy.min_replicas == self.replicas
        return is_least and not first.backlog and not policy.up_window and needed <= policy.min_replicas

    def _scale(self, replicas: int, now: float) -> None:
        """Start pods, or remove starting pods and those with the shortest queues first."""
        more = replicas - self.replicas
        self.replicas = replicas
        if more > 0:
            self._starting += [now + self._model.start_seconds] * more
        for _ in range(-more):
            if self._starting:
                self._starting.pop()
                continue
            shortest = min(self._groups, key=lambda group: group.backlog)
            shortest.replicas -= 1
            self._groups = [group for group in self._groups if group.replicas]


def replay(model: FleetModel, rates: Sequence[float | None], floors: Sequence[int] = ()) -> Outcome:
    """Return the outcome of arrivals.

    Args:
        rates: forward tokens per second by slot; None where unknown.
        floors: lower bounds by slot, beside the policy's own; none if empty.
    """
    fleet = FleetReplay(model)
    counted: list[Outcome] = []
    last, gap, settling = 0.0, _BRIDGED_SLOTS + 1, 0
    for slot, rate in enumerate(rates):
        if floors:
            fleet.bound(floors[slot])
        if rate is None:
            gap += 1
            if gap <= _BRIDGED_SLOTS:
                fleet.serve(last)
            continue
        if gap > _BRIDGED_SLOTS:
            fleet.begin(rate)
            settling = _SETTLING_SLOTS if slot else 0
        gap, last = 0, rate
        outcome = fleet.serve(rate)
        if settling:
            settling -= 1
        else:
            counted.append(outcome)
    return total(counted)


def total(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of several periods together."""
    return Outcome(
        sum(each.tokens for each in outcomes),
        sum(each.in_time for each in outcomes),
        sum(each.replica_seconds for each in outcomes),
        sum(each.seconds for each in outcomes),
        sum(each.bursts for each in outcomes),
    )


# A thousand names take 100 kB.
@lru_cache(maxsize=32)
def _names(count: int) -> frozenset[str]:
    """Return names of ready replicas: the rules only count them."""
    return frozenset(map(str, range(count)))
