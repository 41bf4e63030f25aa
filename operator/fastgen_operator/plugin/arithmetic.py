"""The arithmetic of a recorded decision, step by step. Pure.

The operator's own function, `autoscale.decide`, repeats the decision. The steps are read from its result, or computed
from its inputs by the functions that it calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from fastgen_operator.autoscale.decide import decide
from fastgen_operator.autoscale.decision import Decision, Sizing, counted
from fastgen_operator.autoscale.journal import Entry, to_json
from fastgen_operator.autoscale.measure.capacity import ReplicaSpeeds
from fastgen_operator.autoscale.measure.demand import FAST_SECONDS, SLOW_SECONDS, arriving_tokens
from fastgen_operator.autoscale.measure.rates import RequestShape
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.headroom import DEVIATIONS, LEAST, MOST
from fastgen_operator.autoscale.rules.needs import Need, required_replicas, start_seconds
from fastgen_operator.autoscale.rules.recommend import State
from fastgen_operator.autoscale.sample import Traffic

# Maximum number of pods whose speeds are listed.
_LISTED: Final = 8


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded decision, and this version's decision and state from the same inputs."""

    entry: Entry
    decision: Decision
    state: State

    @classmethod
    def of(cls, entry: Entry) -> Replay:
        """Repeat a decision."""
        return cls(entry, *decide(entry.case))

    @property
    def is_equal(self) -> bool:
        """Whether the decision equals the recorded one, its arithmetic included."""
        return bool(to_json(self.decision) == to_json(self.entry.decision))


def steps_of(replay: Replay) -> dict[str, list[str]]:
    """Return the lines of each step of a replayed decision by title, in order."""
    case, decision = replay.entry.case, replay.decision
    policy, fleet = case.bounded_policy, case.fleet
    raised = ([] if case.floor is None else [str(case.floor)]) + ([policy.learned] if policy.learned else [])
    floor = "".join(f"; {words}" for words in raised)
    before = case.state.last(fleet)
    steps = {
        "fleet": [
            f"{counted(fleet.replicas)}: {len(fleet.ready)} ready, {len(fleet.starting)} starting, {fleet.failing} "
            f"failing or lost, {fleet.without_room} without room; last decision {before}",
            f"bounds {case.policy.min_replicas} to {case.policy.max_replicas}{floor}; targets: first token "
            f"{policy.first_token_seconds:g} s, between tokens {1000 * policy.inter_token_seconds:g} ms",
        ]
    }
    if case.traffic is not None:
        steps["gateway"] = [_traffic(replay, case.traffic)]
    if decision.hold is not None:
        steps["hold"] = [f"{decision.hold.reason}: {decision.hold.message}"]
    if decision.sizing is not None:
        steps |= _sizing_steps(replay, policy, decision.sizing)
    change = "" if decision.change is None else f"; {decision.change.reason}: {decision.change.message}"
    limit = "" if decision.limit is None else f"; limit {decision.limit.reason}: {decision.limit.message}"
    steps["result"] = [f"{counted(decision.replicas)} (last decision {before}){change}{limit}"]
    return steps


def _traffic(replay: Replay, traffic: Traffic) -> str:
    """Say what the gateway holds, and since when neither it nor the engines had a request."""
    case, quiet = replay.entry.case, replay.state.quiet.since
    idle = traffic.fault or f"no request at its pods for {traffic.idle_seconds or 0.0:,.0f} s"
    engines = "none seen yet" if quiet > case.now else f"{case.now - quiet:,.0f} s"
    return (
        f"{counted(traffic.held, 'request')} held; {idle}; engines without work: {engines}; the last replica is "
        f"removed after {case.policy.idle_seconds:,.0f} s of both"
    )


def _sizing_steps(replay: Replay, policy: Policy, sizing: Sizing) -> dict[str, list[str]]:
    case, state, fleet = replay.entry.case, replay.state, replay.entry.case.fleet
    demand, speeds, requests = state.demand, state.speeds, state.demand.requests
    fresh, loaded = demand.fresh(fleet, case.now, policy.scrape_seconds)
    shape, work = requests.mean, requests.work_per_prompt_token
    arriving = sum(arriving_tokens(load.rates) for load in fresh.values())
    scaled = "" if len(fresh) == loaded else f" x {loaded} replicas with load / {len(fresh)} with fresh metrics"
    now_rate = arriving * loaded / len(fresh) * work if fresh else 0.0
    needs = required_replicas(fleet, demand, fresh, loaded, speeds, replace(policy, utilization=sizing.utilization))
    total = f"; {sizing.missing:.2f} more for failing pods and stragglers" if sizing.missing else ""
    kept = f"; {speeds.deficit:.2f} more for stragglers" if speeds.deficit else ""
    factor, window = state.scale_down_window.factor, state.scale_down_window.seconds(policy.down_window)
    learned = f" ({policy.down_window:g} s x {factor}, learned)" if factor > 1 else ""
    return {
        "request": [
            f"mean of the last requests: {shape.prompt:,.0f} prompt tokens, of which {requests.computed_share:.0%} are "
            f"computed, and {shape.generated:,.0f} generated",
            f"forward tokens per prompt token: {requests.computed_share:.2f} + {shape.generated:,.0f} / "
            f"{shape.prompt:,.0f} = {work:.2f}",
        ],
        "demand": [
            f"last scrapes: {arriving:,.0f} prompt tokens/s arrive{scaled} x {work:.2f} = {now_rate:,.0f} tokens/s",
            f"average over {SLOW_SECONDS:g} s, of which {demand.slow.weight:.0%} are known: {demand.slow.value:,.0f} "
            f"tokens/s; over {FAST_SECONDS:g} s: {demand.fast.value:,.0f}",
        ],
        "capacity": list(_capacity(speeds, case.now)),
        "utilization": list(_utilization(case.policy, sizing, shape)),
        "needs": [_need(need) for need in needs],
        "windows": [
            f"up: the largest need is {max(need.up for need in needs):.2f}{total}; least of the last "
            f"{policy.up_window:g} s, rounded up: {round(-state.up_needs.value)}",
            f"down: the largest need is {max(need.down for need in needs):.2f}{kept}; most of the last {window:g} s"
            f"{learned}: {state.down_needs.value:.2f}",
            f"a new pod is expected to take {start_seconds(fleet):.0f} s",
        ],
    }


def _capacity(speeds: ReplicaSpeeds, now: float) -> Iterator[str]:
    assert speeds.capacity is not None
    source = {"StepModel": "from the engines' step times", "Throughput": "their throughput under a backlog"}
    yield (
        f"a replica computes {speeds.capacity.tokens_per_second:,.0f} tokens/s within the targets: median, "
        f"{source[speeds.capacity.source]}, steps of at most {speeds.capacity.token_budget} tokens"
    )
    known = [
        f"{pod} {found.tokens_per_second:,.0f}"
        for pod, speed in sorted(speeds.replicas.items())
        if (found := speed.capacity(now)) is not None
    ]
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    yield f"by pod: {', '.join(known[:_LISTED])}{more}"
    if speeds.stragglers:
        yield "stragglers: " + ", ".join(f"{each.pod} at {each.share:.0%} of the median" for each in speeds.stragglers)


def _utilization(policy: Policy, sizing: Sizing, shape: RequestShape) -> Iterator[str]:
    if not policy.derives_utilization:
        yield f"{sizing.utilization:.0%}, from spec.autoscaling.targets.utilizationPercent"
    else:
        seconds = (shape.computed + shape.generated) / sizing.capacity
        yield (
            f"u = {sizing.utilization:.0%} solves u T + {DEVIATIONS:g} sqrt(2 s u T) = T, within {LEAST:.0%} and "
            f"{MOST:.0%}, with s = ({shape.computed:,.0f} + {shape.generated:,.0f}) / {sizing.capacity:,.0f} = "
            f"{seconds:.3g} s and T = {policy.first_token_seconds:g} s"
        )
    yield (
        f"{sizing.demand:,.0f} / {sizing.capacity:,.0f} / {sizing.utilization:.2f} = {sizing.required:.2f} replicas; "
        f"when fewer are kept, at most {replace(policy, utilization=sizing.utilization).down_utilization:.0%}"
    )


def _need(need: Need) -> str:
    keep = f", keep {max(need.down, need.floor):.2f}" if need.down or need.floor else ""
    return f"{need.change.reason}: up to {need.up:.2f}{keep}: {need.change.message}"
