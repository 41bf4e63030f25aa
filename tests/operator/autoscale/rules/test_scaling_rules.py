"""Each rule of the autoscaler in isolation, with exact numbers. Pure.

The fleets of `test_recommend.py` follow the decisions and exercise several rules at once. Here a fleet ignores them, so
that only one rule can explain the decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.measure.averages import Average
from fastgen_operator.autoscale.measure.capacity import MeasuredCapacity, ReplicaSpeeds
from fastgen_operator.autoscale.measure.demand import Demand
from fastgen_operator.autoscale.measure.rates import ReplicaLoad, RequestSums, rates_between
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.needs import Need, required_replicas
from fastgen_operator.autoscale.rules.recommend import State, recommend
from fastgen_operator.autoscale.sample import Fleet, Sample, StepCoefficients
from harness.fluid import BUDGET, GENERATED, PROMPT, PROMPT_RATE, RATE, STEP, policy

SCRAPE = 5.0
USUAL = ReplicaSpeeds(capacity=MeasuredCapacity(RATE, int(BUDGET), "StepModel"))


@dataclass
class SteadyFleet:
    """Replicas with constant metrics that ignore the decisions; `watch` advances the time.

    Attributes:
        size: replicas of the Deployment; those beyond `ready` are starting, for `passed` seconds, or failing.
        load: prompt tokens per second of each ready replica, relative to its capacity.
        rejected: prompt tokens rejected for each one served.
    """

    policy: Policy
    size: int
    ready: int
    load: float = 0.0
    rejected: float = 0.0
    kv_used: float = 0.1
    backlog: float = 0.0
    passed: float = 0.0
    failing: int = 0
    without_room: int = 0
    start: float = 60.0
    step_model: StepCoefficients = STEP
    time: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    _state: State = field(default_factory=State)
    _prompt: float = 0.0
    _rejected: float = 0.0

    def watch(self, seconds: float) -> SteadyFleet:
        end = self.time + seconds
        while self.time < end:
            self.time += SCRAPE
            self._prompt += self.load * PROMPT_RATE * SCRAPE
            self._rejected += self.rejected * self.load * PROMPT_RATE * SCRAPE
            decision, self._state = recommend(self.policy, self._state, self._observed(), self.time)
            self.decisions.append(decision)
        return self

    @property
    def last(self) -> Decision:
        return self.decisions[-1]

    @property
    def sizes(self) -> list[int]:
        return [decision.replicas for decision in self.decisions]

    @property
    def reason(self) -> str | None:
        return None if self.last.change is None else self.last.change.reason

    def _observed(self) -> Fleet:
        sample = Sample(
            time=self.time,
            arrived_tokens=self._prompt + self._rejected,
            rejected_tokens=self._rejected,
            prefill_tokens=self._prompt,
            decode_tokens=self._prompt * GENERATED / PROMPT,
            ended_requests=self._prompt / PROMPT,
            ended_prompt_tokens=self._prompt,
            ended_generated_tokens=self._prompt * GENERATED / PROMPT,
            backlog_tokens=self.backlog,
            kv_used=self.kv_used,
            kv_capacity_tokens=1e6,
            token_budget=BUDGET,
            step_model=self.step_model,
        )
        names = frozenset(f"pod-{number}" for number in range(self.ready))
        return Fleet(
            replicas=self.size,
            ready=names,
            samples=dict.fromkeys(names, sample),
            starting=(self.passed,) * (self.size - self.ready - self.failing - self.without_room),
            failing=self.failing,
            without_room=self.without_room,
            start_seconds=self.start,
        )


def of(reason: str, needs: list[Need]) -> Need:
    return next(need for need in needs if need.change.reason == reason)


# --- KV cache


@pytest.mark.parametrize(
    ("replicas", "kv_used", "wanted"),
    [(2, 0.79, 2), (2, 0.81, 3), (2, 0.95, 3), (8, 1.0, 10)],
)
def test_the_kv_cache_is_used_up_to_80_percent(replicas: int, kv_used: float, wanted: int) -> None:
    fleet = SteadyFleet(policy(), replicas, replicas, load=0.1, kv_used=kv_used).watch(60)
    assert fleet.last.replicas == wanted
    assert fleet.reason == ("KVCacheFull" if wanted > replicas else None)


@pytest.mark.parametrize(("kv_used", "wanted"), [(0.15, 1), (0.35, 2), (0.55, 3), (0.75, 4)])
def test_a_scale_down_leaves_room_for_the_used_kv_cache(kv_used: float, wanted: int) -> None:
    fleet = SteadyFleet(policy(down_window=10.0), 4, 4, load=0.05, kv_used=kv_used).watch(300)
    assert (fleet.last.replicas, min(fleet.sizes)) == (wanted, wanted)


def test_replicas_without_metrics_count_with_the_mean_kv_cache_use() -> None:
    samples = {name: Sample(time=0.0, kv_used=used) for name, used in (("a", 0.4), ("b", 0.8))}
    loads = {name: ReplicaLoad(sample, rates_between(Sample(time=-5.0), sample)) for name, sample in samples.items()}
    fleet = Fleet(replicas=3, ready=frozenset("abc"), samples=samples)
    needs = required_replicas(fleet, Demand(replicas=loads, first_seen={}), loads, 3, USUAL, policy())
    assert of("KVCacheFull", needs).up == pytest.approx(3 * 0.6 / 0.8)


# --- scale-up stabilization window


@pytest.mark.parametrize("window", [0.0, 30.0, 60.0, 120.0])
def test_a_scale_up_waits_for_its_stabilization_window(window: float) -> None:
    fleet = SteadyFleet(policy(up_window=window), 2, 2, load=0.1).watch(300)
    fleet.kv_used = 0.95
    began = fleet.time
    fleet.watch(window + 3 * SCRAPE)
    grew = next(index for index, size in enumerate(fleet.sizes) if size > 2)
    # The first scrape of the new load comes one period after it began.
    assert window + SCRAPE <= (grew + 1) * SCRAPE - began <= window + 2 * SCRAPE


def test_a_lull_restarts_the_scale_up_window() -> None:
    fleet = SteadyFleet(policy(up_window=60.0), 2, 2, load=0.1).watch(300)
    for _ in range(5):
        fleet.kv_used = 0.95
        fleet.watch(50)
        fleet.kv_used = 0.1
        fleet.watch(SCRAPE)
    assert set(fleet.sizes) == {2}


def test_a_restarted_operator_observes_a_full_window_before_scaling_up() -> None:
    fleet = SteadyFleet(policy(up_window=60.0), 2, 2, load=0.1, kv_used=0.95).watch(60)
    assert set(fleet.sizes) == {2}
    assert fleet.watch(15).last.replicas == 3


# --- rejected requests


@pytest.mark.parametrize(
    ("rejected", "times"),
    [(0.0, 1.0), (0.25, 1.25), (1.0, 2.0), (20.0, 2.0)],
    ids=["none", "one in five", "as many as are served", "clients that retry"],
)
def test_rejected_requests_are_demand_capped_at_the_admitted_rate(rejected: float, times: float) -> None:
    fleet = SteadyFleet(policy(), 2, 2, load=0.5, rejected=rejected).watch(600)
    assert fleet.last.load == pytest.approx(times * 2 * 0.5, rel=1e-3)


def test_a_fleet_that_rejects_requests_scales_up() -> None:
    assert SteadyFleet(policy(), 4, 4, load=0.8, rejected=0.0).watch(300).last.replicas == 4
    # 4 · 0.8 · 1.2 replicas' worth at 85 %.
    assert SteadyFleet(policy(), 4, 4, load=0.8, rejected=0.2).watch(300).last.replicas == 5


# --- replicas that must run on one node, which is full


def test_a_fleet_does_not_grow_while_its_only_node_is_full_and_says_so() -> None:
    fleet = SteadyFleet(policy(), 3, 2, load=2.0, without_room=1).watch(120)
    assert set(fleet.sizes) == {3}
    assert fleet.last.limit is not None
    assert fleet.last.limit.reason == "VolumeOnOneNode"
    fleet.without_room = 0
    fleet.ready = 3
    assert fleet.watch(30).last.replicas > 3


def test_a_full_node_limits_nothing_that_the_load_requires() -> None:
    fleet = SteadyFleet(policy(down_window=30.0), 3, 2, load=0.2, without_room=1).watch(300)
    assert fleet.last.replicas < 3, "it still scales down"
    assert fleet.last.limit is None


# --- starting pods


def queue_need(*, demand: float, backlog: float = 0.0, starting: tuple[float, ...] = ()) -> float:
    """Queue need of one ready replica; `demand` in replicas, `backlog` in seconds of one, 60 s start time."""
    sample = Sample(time=0.0, backlog_tokens=backlog * PROMPT_RATE, token_budget=BUDGET)
    loads = {"a": ReplicaLoad(sample, rates_between(Sample(time=-5.0), sample))}
    ended = Sample(
        time=0.0,
        prefill_tokens=1000 * PROMPT,
        decode_tokens=1000 * GENERATED,
        ended_requests=1000,
        ended_prompt_tokens=1000 * PROMPT,
        ended_generated_tokens=1000 * GENERATED,
    )
    known = Demand(
        replicas=loads,
        first_seen={},
        slow=Average(30.0, demand * RATE, 1.0),
        fast=Average(10.0, demand * RATE, 1.0),
        requests=RequestSums().add([rates_between(Sample(time=-5.0), ended)]),
    )
    fleet = Fleet(replicas=1, ready=frozenset("a"), samples={"a": sample}, starting=starting, start_seconds=60.0)
    return of("BacklogTooLong", required_replicas(fleet, known, loads, 1, USUAL, policy())).up


@pytest.mark.parametrize(
    ("starting", "need"),
    [
        ((), 3.0),
        ((0.0,), 3.0),
        ((30.0,), 2.5),
        ((60.0,), 2.0),
        ((15.0, 15.0), 2.5),
        ((60.0, 60.0, 60.0), 2.0),
        # Late by half a start, and by a whole one.
        ((90.0,), 2.5),
        ((120.0,), 3.0),
        ((3600.0,), 3.0),
    ],
)
def test_starting_pods_reduce_the_need_by_the_work_that_they_will_do(starting: tuple[float, ...], need: float) -> None:
    # Demand for two replicas arrives at one. When a new pod becomes ready, 60 s of one replica's work remain, less the
    # work of the starting pods. It should be drained within another 60 s.
    assert queue_need(demand=2.0, starting=starting) == pytest.approx(need)


def test_only_the_backlog_that_remains_when_a_new_pod_is_ready_adds_replicas() -> None:
    assert queue_need(demand=0.5, backlog=30.0) == pytest.approx(0.5)
    assert queue_need(demand=0.5, backlog=90.0) == pytest.approx(0.5 + (90 + 30 - 60) / 60)
    assert queue_need(demand=0.5, backlog=90.0, starting=(60.0,)) == pytest.approx(0.5)


# --- unready pods


@pytest.mark.parametrize(("ready", "wanted"), [(1, 4), (2, 3), (3, 3), (4, 3)])
def test_a_scale_down_leaves_enough_ready_replicas(ready: int, wanted: int) -> None:
    # The used KV cache requires two replicas, regardless of how many are ready.
    fleet = SteadyFleet(policy(down_window=10.0), 4, ready, load=0.01, kv_used=min(0.99, 1.2 / ready))
    assert fleet.watch(35).last.replicas == wanted


# --- sudden growth


@pytest.mark.parametrize(
    ("load", "wanted", "reason"), [(3.7, 2, None), (4.0, 5, "DemandJumped")], ids=["below twice", "twice"]
)
def test_a_jump_to_twice_the_ready_replicas_scales_up_at_the_next_scrape(
    load: float, wanted: int, reason: str | None
) -> None:
    # A step of 30 ms leaves 10 ms for tokens: the inter-token target limits a replica to 100 forward tokens per step.
    # The replica can process more, so a jump causes no backlog, and only the averages can detect it.
    bounded = (100 / 0.03) / RATE
    fleet = SteadyFleet(policy(inter_token_seconds=0.03, min_replicas=2), 2, 2, load=0.3 * bounded).watch(600)
    fleet.load = load * bounded
    fleet.watch(SCRAPE)
    # 5 s of a jump from 0.6 to 2 · load have a weight of 15 % in the 30 s average, and 39 % in the 10 s average.
    assert fleet.last.load == pytest.approx(0.6 + (2 * load - 0.6) * 0.1535, rel=1e-3)
    assert (fleet.last.replicas, fleet.reason) == (wanted, reason)


@pytest.mark.parametrize(("first", "sizes"), [(2, [6, 12, 24, 48]), (3, [7, 14, 28, 56]), (10, [20, 40, 80, 160])])
def test_scaling_up_is_limited_to_twice_the_size_or_four_replicas_in_15_seconds(first: int, sizes: list[int]) -> None:
    fleet = SteadyFleet(policy(max_replicas=1000), first, first, load=0.3).watch(300)
    fleet.backlog = 1e7
    fleet.watch(60)
    assert fleet.sizes[-12:] == [size for size in sizes for _ in range(3)]
    assert fleet.last.limit is not None
    assert fleet.last.limit.reason == "RateLimited"
