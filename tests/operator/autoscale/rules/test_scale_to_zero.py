"""From one replica to none and back, on evidence from engines and gateway. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_operator.api.autoscaling import ScaleDown, ScaleUp, ScalingPolicy
from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.journal import Journal, journal_from_json, to_json
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.rate_limits import NO_LIMITS, RateLimits
from fastgen_operator.autoscale.rules.recommend import DOWN_SECONDS
from fastgen_operator.autoscale.rules.scale_to_zero import FAULT_SECONDS
from fastgen_operator.autoscale.rules.schedules import Floor
from fastgen_operator.autoscale.sample import Sample, StepCoefficients, Traffic
from fastgen_operator.autoscale.watchlist import Record, Subject
from fastgen_operator.plugin.arithmetic import Replay, steps_of
from harness.fluid import BUDGET, GENERATED, PROMPT, PROMPT_RATE, STEP, policy
from harness.objects import pod_with

IDLE = 60.0
DECIDED = {"RequestsHeld", "Idle"}


@dataclass
class Model:
    """One FastGenDeployment with minReplicas 0, whose replicas are ready one scrape after they were decided.

    Attributes:
        size: replicas that run.
        load: prompt tokens per second of each replica, in the capacity of one.
        running: requests that each replica runs.
        held, idle, fault: what the gateway says.
        answers: whether scrapes of the replicas succeed.
        carries_out: whether decisions become replicas.
        step_model: what the engines have measured.
    """

    size: int = 0
    load: float = 0.0
    running: float = 0.0
    held: int = 0
    idle: float | None = 1e6
    fault: str = ""
    answers: bool = True
    carries_out: bool = True
    step_model: StepCoefficients = STEP
    policy: Policy = field(default_factory=lambda: policy(min_replicas=0, max_replicas=8, idle_seconds=IDLE))
    rate_limits: RateLimits = NO_LIMITS
    floor: Floor | None = None
    is_dry_run: bool = False
    asks: bool = True
    record: Record = field(default_factory=lambda: Record("u"))
    time: float = 0.0
    served: dict[str, float] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def watch(self, seconds: float) -> list[int]:
        """Advance the time; return the decided sizes."""
        first = len(self.decisions)
        for _ in range(int(seconds / self.policy.scrape_seconds)):
            self.step()
        return [decision.replicas for decision in self.decisions[first:]]

    def step(self) -> Decision:
        """Scrape and decide once, and carry the decision out."""
        self.time += self.policy.scrape_seconds
        names = [f"chat-{n}" for n in range(self.size)]
        self.served = {
            name: self.served.get(name, 0.0) + self.load * PROMPT_RATE * self.policy.scrape_seconds for name in names
        }
        subject = Subject(
            uid="u",
            policy=self.policy,
            model_name="m",
            replicas=self.size,
            pods=tuple(pod_with(name, scheduled_at=0.0, started_at=0.0, ready_since=1.0) for name in names),
            is_dry_run=self.is_dry_run,
            floor=self.floor,
            rate_limits=self.rate_limits,
        )
        samples = {name: self.sample(name) if self.answers else None for name in names}
        idle = None if self.fault else self.idle
        traffic = Traffic(self.held, idle, self.fault) if self.asks else None
        self.record.update(subject, samples, self.time, self.time, traffic)
        decision = self.record.decision
        assert decision is not None
        self.decisions.append(decision)
        if self.carries_out:
            self.size = decision.replicas
        return decision

    def sample(self, name: str) -> Sample:
        served = self.served[name]
        return Sample(
            time=self.time,
            arrived_tokens=served,
            prefill_tokens=served,
            decode_tokens=served * GENERATED / PROMPT,
            ended_requests=served / PROMPT,
            ended_prompt_tokens=served,
            ended_generated_tokens=served * GENERATED / PROMPT,
            running=self.running,
            kv_capacity_tokens=1e6,
            token_budget=BUDGET,
            step_model=self.step_model,
        )

    def restart(self) -> None:
        """Forget what the operator remembers."""
        self.record = Record("u")


def change(model: Model) -> str:
    found = model.decisions[-1].change
    return "" if found is None else found.reason


def hold(model: Model) -> str:
    found = model.decisions[-1].hold
    return "" if found is None else found.reason


def test_an_idle_replica_is_removed_after_the_time_and_a_held_request_starts_one() -> None:
    model = Model(size=1)
    assert set(model.watch(IDLE)) == {1}, "removed before idleSeconds had been observed"
    assert model.watch(10)[-1] == 0
    assert (change(model), hold(model)) == ("Idle", "")
    assert set(model.watch(600)) == {0}
    model.held = 3
    assert model.step().replicas == 1
    assert change(model) == "RequestsHeld"
    found = model.decisions[-1].change
    assert found is not None
    assert found.message == "the gateway holds 3 requests, and there is no replica"


@pytest.mark.parametrize("size", [1, 3])
def test_idle_replicas_that_never_measured_their_speed_are_removed(size: int) -> None:
    """A few requests in one batch take a few steps of one size, from which no step model is fitted."""
    model = Model(size=size, load=0.5, step_model=StepCoefficients(0.0, 0.0, 0.0))
    model.watch(30)
    assert hold(model) == "CapacityUnknown"
    model.load = 0.0
    assert model.watch(size * 600)[-1] == 0
    assert (change(model), hold(model)) == ("Idle", "")


def test_no_decision_is_repeated_while_nothing_changes() -> None:
    model = Model(size=1)
    model.watch(120)
    assert len({(d.replicas, d.hold, d.limit) for d in model.decisions[-8:]}) == 1
    assert model.decisions[-1] == model.decisions[-2], "a new status each time"


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        ({"load": 0.01}, "requests arrive"),
        ({"running": 1.0}, "a request runs"),
        ({"held": 1}, "the gateway holds a request"),
        ({"idle": IDLE - 1}, "a request has just ended at the gateway"),
        ({"idle": None}, "a pod of the gateway has not said so"),
        ({"fault": "pod g of the gateway does not answer"}, "a pod of the gateway is unreachable"),
        ({"asks": False}, "no pod of the gateway was asked"),
        ({"answers": False}, "the engine does not answer"),
        ({"floor": Floor("office", 1, None)}, "a schedule wants one"),
        ({"rate_limits": RateLimits(ScaleUp(), ScaleDown(select_policy="Disabled"))}, "scaling down is disabled"),
        ({"policy": policy(min_replicas=1, max_replicas=8, idle_seconds=IDLE)}, "minReplicas is 1"),
    ],
)
def test_the_last_replica_stays_without_evidence_of_idleness(evidence: dict[str, object], why: str) -> None:
    model = Model(size=1, **evidence)  # type: ignore[arg-type]
    assert set(model.watch(4 * IDLE)) == {1}, why


def test_nothing_is_removed_while_the_engine_does_not_answer() -> None:
    model = Model(size=1)
    model.watch(IDLE - 10)
    model.answers = False
    assert set(model.watch(300)) == {1}


def test_a_gap_in_the_metrics_starts_the_idle_time_anew_unless_it_is_short() -> None:
    for missed, left in ((2, 10), (4, IDLE + 5)):
        model = Model(size=1)
        model.watch(IDLE - 10)
        model.answers = False
        model.watch(missed * model.policy.scrape_seconds)
        model.answers = True
        assert set(model.watch(left - 10)) <= {1}, missed
        assert model.watch(10)[-1] == 0, missed


def test_a_request_between_two_scrapes_is_no_idleness() -> None:
    model = Model(size=1)
    model.watch(IDLE - 10)
    # It arrived and ended, so no gauge shows it.
    model.load = 0.001
    model.step()
    model.load = 0.0
    assert set(model.watch(IDLE - 5)) == {1}


def test_a_fleet_shrinks_to_one_replica_by_the_other_rules_before_the_last_one_goes() -> None:
    model = Model(size=4, load=0.6)
    model.watch(300)
    model.load = 0.0
    sizes = model.watch(1200)
    assert sizes[-1] == 0
    steps = [after - before for before, after in zip([4, *sizes], sizes, strict=False)]
    assert min(steps) == -1, "more than one replica removed in a step"
    assert sizes.index(0) - sizes.index(1) >= DOWN_SECONDS / model.policy.scrape_seconds


@settings(max_examples=25, deadline=None)
@given(
    loads=st.lists(st.sampled_from([0.0, 0.0, 0.2, 1.5, 3.0]), min_size=6, max_size=6),
    held=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    idle=st.sampled_from([None, 0.0, IDLE, 1e6]),
)
def test_minreplicas_0_never_gives_less_than_1_does_except_for_the_last_idle_replica(
    loads: list[float], held: list[int], idle: float | None
) -> None:
    ours = Model(size=2, idle=idle)
    other = Model(size=2, policy=policy(min_replicas=1, max_replicas=8), carries_out=False)
    for load, waiting in zip(loads, held, strict=True):
        for _ in range(20):
            ours.held = waiting
            # The gateway releases what it holds as soon as there is a replica.
            ours.load = load if ours.size else 0.0
            ours.running = float(ours.load > 0)
            other.size, other.load, other.record = ours.size, ours.load, other.record
            given_one, given_none = other.step(), ours.step()
            if ours.running or (waiting and ours.decisions[-1].replicas == 0):
                assert given_none.replicas >= 1
            if given_none.replicas:
                assert given_none.replicas == max(1, given_one.replicas) or other.size == 0
            other.record.state = replace(other.record.state, replicas=max(1, given_none.replicas))


def test_a_restart_of_the_operator_changes_nothing_at_zero_and_wakes_for_what_is_held() -> None:
    model = Model(size=1)
    model.watch(90)
    assert model.size == 0
    model.restart()
    assert set(model.watch(60)) == {0}
    assert (change(model), hold(model)) == ("", "")
    model.held = 1
    model.restart()
    assert model.step().replicas == 1


def test_a_restart_of_the_operator_starts_the_idle_time_anew() -> None:
    model = Model(size=1)
    model.watch(IDLE - 10)
    model.restart()
    assert set(model.watch(IDLE)) == {1}


def test_a_woken_replica_that_is_slow_to_start_stays() -> None:
    model = Model(held=1)
    model.step()
    model.carries_out, model.size, model.held = False, 0, 0
    # The request has been given up, and the reconcile is late.
    assert set(model.watch(300)) == {1}
    model.size = 1
    model.carries_out = True
    assert model.watch(IDLE + 10)[-1] == 0, "a replica without requests stays for ever"


def test_a_decision_for_zero_that_is_carried_out_late_stands() -> None:
    model = Model(size=1, carries_out=False)
    model.watch(IDLE + 10)
    assert set(model.watch(120)) == {0}
    assert len(model.record.state.scalings) <= 1


@pytest.mark.parametrize("limits", [ScaleUp(select_policy="Disabled"), ScaleUp(stabilization_seconds=600)])
def test_the_first_replica_is_not_limited(limits: ScaleUp) -> None:
    window = float(limits.stabilization_seconds)
    model = Model(
        held=1,
        rate_limits=RateLimits(limits, ScaleDown()),
        policy=policy(min_replicas=0, max_replicas=8, idle_seconds=IDLE, up_window=window),
    )
    assert model.step().replicas == 1


def test_limits_of_scaling_down_apply_to_the_last_replica() -> None:
    down = ScaleDown(policies=[ScalingPolicy(type="Pods", value=1, period_seconds=600)])
    model = Model(size=2, rate_limits=RateLimits(ScaleUp(), down))
    sizes = model.watch(900)
    assert sizes[-1] == 1, "two removed within the period"
    assert model.watch(600)[-1] == 0


def test_a_schedule_raises_a_sleeping_fleet_and_its_end_lets_it_sleep_again() -> None:
    model = Model(size=0)
    model.step()
    model.floor = Floor("office", 2, None)
    assert model.step().replicas == 2
    assert change(model) == "ScheduleStarted"
    model.watch(IDLE * 3)
    assert model.size == 2
    model.floor = None
    assert model.watch(900)[-1] == 0


def test_an_unreachable_gateway_is_reported_once_it_lasts() -> None:
    model = Model(size=0, fault="pod g of the gateway does not answer")
    model.watch(FAULT_SECONDS - 5)
    assert hold(model) == ""
    model.watch(10)
    assert hold(model) == "GatewayUnreachable"
    model.fault = ""
    model.step()
    assert hold(model) == ""
    busy = Model(size=1, load=0.2, running=1.0, fault="pod g of the gateway does not answer")
    busy.watch(200)
    assert hold(busy) == "", "a busy fleet does not need the gateway's evidence"
    idle = Model(size=1, fault="pod g of the gateway does not answer")
    idle.watch(IDLE + 10)
    assert hold(idle) == "GatewayUnreachable"


def test_a_request_at_a_reachable_pod_wakes_although_another_pod_is_silent() -> None:
    model = Model(size=0, held=1, fault="pod g of the gateway does not answer")
    assert model.step().replicas == 1


def test_a_gateway_that_lies_keeps_one_replica_and_removes_none_that_works() -> None:
    model = Model(size=2, load=0.6, running=2.0, idle=1e12)
    assert min(model.watch(1200)) == 2, "removed by what the gateway says"
    model.load, model.running, model.held = 0.0, 0.0, 10**9
    assert model.watch(1200)[-1] == 1
    assert max(decision.replicas for decision in model.decisions[-100:]) == 1, "added by what the gateway says"


def test_a_dry_run_recommends_zero_and_one_and_carries_out_nothing() -> None:
    model = Model(size=1, is_dry_run=True, carries_out=False)
    assert model.watch(IDLE + 10)[-1] == 0
    assert set(model.watch(120)) == {0}
    model.load, model.running, model.idle = 0.2, 1.0, 0.0
    assert model.watch(20)[-1] == 1, "the present replica has work"
    # Another autoscaler removes it, and a request comes.
    model.size, model.held, model.load, model.running = 0, 1, 0.0, 0.0
    assert model.watch(10)[-1] == 1
    model.held, model.idle = 0, 1e6
    assert model.watch(400)[-1] == 0


def test_decisions_about_the_first_replica_can_be_repeated_from_the_journal() -> None:
    model = Model(size=1)
    model.watch(90)
    model.held = 2
    model.step()
    journal = journal_from_json(to_json(model.record.journal))
    assert isinstance(journal, Journal)
    assert [entry.decision.replicas for entry in journal.changes] == [0, 1]
    assert {entry.decision.change.reason for entry in journal.changes if entry.decision.change} == DECIDED
    assert journal.changes[-1].case.traffic == Traffic(2, 1e6, "")


def test_an_explanation_says_how_long_there_was_no_request() -> None:
    model = Model(size=1)
    model.watch(40)
    latest = model.record.journal.latest
    assert latest is not None
    (line,) = steps_of(Replay.of(latest))["gateway"]
    assert line == (
        "0 requests held; no request at its pods for 1,000,000 s; engines without work: 35 s; the last replica is "
        "removed after 60 s of both"
    )
    model.fault = "pod g of the gateway does not answer"
    model.step()
    latest = model.record.journal.latest
    assert latest is not None
    assert model.fault in steps_of(Replay.of(latest))["gateway"][0]
