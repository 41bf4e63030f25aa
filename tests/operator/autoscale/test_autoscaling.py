"""Engine metrics to Deployment replicas, status and Events, against a real API server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastgen_operator.autoscale.decision import Sizing
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS, Arrivals
from harness.adverse import NO_GPU
from harness.engines import FakeEngine
from harness.fluid import PROMPT_RATE, RATE
from harness.loopback import LOOPBACK
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

ENGINE: Object = {"device": "cpu", "interTokenTarget": 200}

Engines = Callable[[Space, int], list[FakeEngine]]


def autoscaled(**autoscaling: Any) -> Object:
    """Return a FastGenDeployment with short stabilization windows."""
    fast = {
        "maxReplicas": 4,
        "scaleDown": {"stabilizationSeconds": 3},
    }
    return resource(engine=ENGINE, autoscaling={**fast, **autoscaling})


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Make pods of `chat` ready, each with a fake engine."""
    made: list[FakeEngine] = []
    behind: dict[str, FakeEngine] = {}

    def make(space: Space, count: int) -> list[FakeEngine]:
        for pod in space.wait_pods(count):
            name = pod["metadata"]["name"]
            if name in behind:
                continue
            engine = behind[name] = FakeEngine(next(LOOPBACK)).start()
            made.append(engine)
            space.set_pod(pod, ready=True)
            address = {"podIP": engine.address, "podIPs": [{"ip": engine.address}]}
            space.patch(f"pod/{name}", {"status": address}, "status")
        return [behind[pod["metadata"]["name"]] for pod in space.pods()]

    yield make
    for engine in made:
        engine.close()


def status(space: Space) -> Object:
    found: Object = space.get("fgd", "chat").get("status", {})
    return found


def desired(space: Space) -> int:
    """Return the replicas that status and Deployment agree on; 0 while they differ."""
    replicas: int = space.get("deployment", "chat")["spec"]["replicas"]
    return replicas if status(space)["autoscaling"]["desiredReplicas"] == replicas else 0


def tells(space: Space, demand: float) -> bool:
    """Return whether the status has the capacity and about this demand, in tokens per second."""
    found = status(space)
    told = found.get("autoscaling", {}).get("demandTokensPerSecond")
    # Notably different ones are corrected once the demand has been measured for long enough.
    return "capacity" in found and told is not None and not Sizing(demand, RATE, 1.0, 0.0).differs(told)


def let_be_asked(engine: FakeEngine, times: int) -> None:
    """Wait until the engine has been scraped `times` more."""
    target = engine.scrapes + times
    eventually(lambda: engine.scrapes >= target, within=30, what=f"{times} scrapes")


def test_a_backlog_scales_up_and_its_end_scales_down_and_the_status_records_it(
    space: Space, operator: OperatorProcess, engines: Engines
) -> None:
    space.apply(autoscaled())
    (engine,) = engines(space, 1)
    engine.prompt_rate = 0.3 * PROMPT_RATE
    space.wait_condition("ScalingActive", "True", "Active")
    # The first scrape gives no rate, so nothing is decided.
    let_be_asked(engine, 6)
    assert desired(space) == 1
    capacity = eventually(lambda: status(space).get("capacity"), within=20, what="the capacity")
    assert capacity is not None
    assert (capacity["tokenBudget"], capacity["source"]) == (512, "StepModel")
    assert "history" not in status(space)["autoscaling"]

    engine.backlog = 60_000
    eventually(lambda: desired(space) >= 2, within=20, what="more replicas")
    recorded = status(space)["autoscaling"]
    assert recorded["reason"] in ("BacklogTooLong", "DemandJumped")
    assert (recorded["history"][-1]["fromReplicas"], recorded["history"][0]["toReplicas"]) == (
        1,
        recorded["desiredReplicas"],
    )
    many = recorded["desiredReplicas"]

    # The backlog ends when all pods are ready: without it, the scale-down could delete pods that start.
    for other in engines(space, many):
        other.prompt_rate = 0.1 * PROMPT_RATE
    engine.backlog = 0
    eventually(lambda: 0 < desired(space) < many, within=60, what="fewer replicas")
    recorded = status(space)["autoscaling"]
    assert (recorded["reason"], recorded["history"][0]["fromReplicas"]) == ("DemandFell", many)

    def scaling_events() -> dict[str, Object] | None:
        """Events are written after the status."""
        events = {event["reason"]: event for event in space.items("events")}
        return events if {"ScaledUp", "ScaledDown"} <= events.keys() else None

    events = eventually(scaling_events, within=20, what="the events")
    assert events is not None
    assert f"to {many} replicas" in events["ScaledUp"]["message"] or many > 2
    assert events["ScaledDown"]["message"].startswith(f"from {many} to ")
    chat = f"chat/{space.name}"
    made = ("fastgen_operator_scaling_decisions_total", f"{chat}/DemandFell")
    eventually(lambda: made in operator.metrics(), within=20, what="the decision in the metrics")
    age = ("fastgen_operator_scrape_age_seconds", chat)
    eventually(lambda: operator.metrics()[age] < 10, within=20, what="a recent scrape")
    assert ("fastgen_operator_scaling_load_replicas", chat) in operator.metrics()


def test_a_noisy_load_and_a_restart_cause_no_writes(space: Space, operator: OperatorProcess, engines: Engines) -> None:
    space.apply(autoscaled(minReplicas=2))
    for engine in engines(space, 2):
        # In the middle between one replica and three: no interval alone requires another number.
        engine.prompt_rate = 0.65 * PROMPT_RATE
    space.wait_condition("ScalingActive", "True", "Active")
    eventually(lambda: tells(space, 1.3 * RATE), within=60, what="the capacity and the demand")
    # What is told follows from the first intervals, and stays unless it is very wrong. Noise may add what is missing.
    space.patch("fgd/chat", {"status": {"autoscaling": {"demandTokensPerSecond": round(1.3 * RATE)}}}, "status")
    before = space.settled()
    let_be_asked(engine, 10)
    assert space.versions() == before, "noise is written down"
    operator.restart()
    let_be_asked(engine, 10)
    assert space.versions() == before, "a restart is written down"


def test_a_new_leader_learns_a_lower_bound_from_the_arrivals_in_the_status(
    space: Space, operator: OperatorProcess, engines: Engines
) -> None:
    """Four hours with short bursts of four times the load, which the former leader has recorded."""
    arrivals, now = Arrivals(), time.time()
    for slot in range(-960, 0):
        load = 4.1 if slot % 40 >= 32 else 1.0
        arrivals = arrivals.add(now + slot * SLOT_SECONDS, load * RATE)
    operator.stop()
    space.apply(autoscaled(learning="Advise", maxReplicas=8))
    learning = {"message": "as before", "arrivals": arrivals.encode()}
    space.patch("fgd/chat", {"status": {"autoscaling": {"learning": learning}}}, "status")
    operator.start()
    (engine,) = engines(space, 1)
    engine.prompt_rate = 0.3 * PROMPT_RATE

    def learned() -> Object:
        found: Object = status(space)["autoscaling"]["learning"]
        return found if found.get("minReplicas") else {}

    shown = eventually(learned, within=60, what="a learned bound")
    assert shown is not None
    assert shown["minReplicas"] == 2, "the first step"
    assert "the present settings serve" in shown["message"]
    # The metrics show it after the next scrape.
    metric = ("fastgen_operator_learned_replicas", f"chat/{space.name}")
    eventually(lambda: operator.metrics().get(metric) == 2, within=30, what="the metric")
    let_be_asked(engine, 3)
    assert desired(space) == 1, "advice changes nothing"

    space.patch("fgd/chat", {"spec": {"autoscaling": {"learning": "Apply"}}})
    eventually(lambda: desired(space) == 2, within=30, what="the learned bound")
    step = status(space)["autoscaling"]["history"][0]
    assert (step["reason"], step["fromReplicas"], step["toReplicas"]) == ("FloorLearned", 1, 2)
    assert "the load of the last hours requires at least 2 replicas" in step["message"]
    operator.restart()
    let_be_asked(engine, 6)
    assert status(space)["autoscaling"]["learning"]["minReplicas"] == 2, "a restart is no reason for the next step"
    assert desired(space) == 2


def test_invalid_metrics_and_hanging_engines_hold_the_fleet_and_set_the_condition(
    space: Space, operator: OperatorProcess, engines: Engines
) -> None:
    space.apply(autoscaled(minReplicas=2))
    first, second = engines(space, 2)
    space.wait_condition("ScalingActive", "True", "Active")

    # One of two replicas has no metrics; those of the other still count.
    first.fault = "hangs"
    let_be_asked(second, 8)
    space.wait_condition("ScalingActive", "True")

    second.fault = "huge"
    condition = space.wait_condition("ScalingActive", "False", "MetricsStale")
    assert "no ready replica has returned usable metrics for" in condition["message"]
    second.fault = "nan"
    let_be_asked(second, 3)
    second.fault = "other model"
    let_be_asked(second, 3)
    assert desired(space) == 2
    assert space.condition("ScalingActive")["reason"] == "MetricsStale"
    counted = {labels for name, labels in operator.metrics() if name == "fastgen_operator_scrape_failures_total"}
    assert {"TimedOut", "BadValue", "OtherModel"} <= counted

    first.fault = second.fault = "none"
    space.wait_condition("ScalingActive", "True", "Active")


def test_bounds_apply_before_any_metrics_and_a_fixed_number_ends_autoscaling(space: Space) -> None:
    space.apply(autoscaled(minReplicas=2))
    space.wait_pods(2)
    space.make_ready(count=2)
    assert space.wait_condition("ScalingActive", "False")["reason"] in ("NoMetrics", "NoReadyReplicas")
    space.patch("fgd/chat", {"spec": {"autoscaling": {"minReplicas": 3}}})
    eventually(lambda: desired(space) == 3, within=20, what="the new minimum")
    assert status(space)["autoscaling"]["reason"] == "BoundsChanged"

    with pytest.raises(Exception, match=r"spec\.replicas and spec\.autoscaling are mutually exclusive"):
        space.kubectl("scale", "fgd/chat", "--replicas=1")
    space.patch("fgd/chat", {"spec": {"autoscaling": None, "replicas": 1}})
    space.wait_pods(1)

    def is_plain() -> bool:
        now = status(space)
        reasons = {condition["type"]: condition["reason"] for condition in now["conditions"]}
        return "autoscaling" not in now and reasons["ScalingActive"] == reasons["ScalingLimited"] == "ScalingDisabled"

    eventually(is_plain, within=20, what="a status without autoscaling")
    # As an external autoscaler does.
    space.kubectl("scale", "fgd/chat", "--replicas=2")
    space.wait_pods(2)


ALWAYS = {"name": "always", "start": "0 0 * * *", "durationSeconds": 86_400, "minReplicas": 3}


def event_of(space: Space, reason: str) -> str:
    """Return the message of the newest Event with that reason; Events are written after the status."""
    found = [event["message"] for event in space.items("events") if event["reason"] == reason]
    return found[-1] if found else ""


def test_an_active_schedule_is_a_floor_and_its_end_is_reported(space: Space) -> None:
    space.apply(autoscaled(schedules=[ALWAYS]))
    eventually(lambda: desired(space) == 3, within=20, what="the floor of the schedule")
    shown = status(space)["autoscaling"]["activeSchedule"]
    assert (shown["name"], shown["minReplicas"]) == ("always", 3)
    started = eventually(lambda: event_of(space, "ScheduleStarted"), within=20, what="the Event")
    assert started == f"schedule always requires at least 3 replicas until {shown['until']}"
    space.apply(autoscaled(schedules=[{**ALWAYS, "start": "0 0 29 2 *", "durationSeconds": 60}]))
    ended = eventually(lambda: event_of(space, "ScheduleEnded"), within=20, what="the end")
    assert ended == "schedule always no longer applies; spec.autoscaling.minReplicas is 1"
    assert "activeSchedule" not in status(space)["autoscaling"]
    assert desired(space) == 3, "nothing is removed without metrics"


def test_a_dry_run_recommends_while_the_scale_subresource_decides(
    space: Space, operator: OperatorProcess, engines: Engines
) -> None:
    trial = resource(engine=ENGINE, replicas=1, autoscaling={"maxReplicas": 4, "mode": "DryRun"})
    space.apply(trial)
    (engine,) = engines(space, 1)
    engine.prompt_rate = 0.3 * PROMPT_RATE
    space.wait_condition("ScalingActive", "False", "DryRun")
    let_be_asked(engine, 6)
    engine.backlog = 60_000
    eventually(lambda: status(space)["autoscaling"].get("recommendedReplicas", 0) >= 2, within=20, what="advice")
    assert space.get("deployment", "chat")["spec"]["replicas"] == 1
    said = eventually(lambda: event_of(space, "ScalingRecommended"), within=20, what="the Event")
    assert said.startswith("in a dry run, while spec.replicas is 1: ")
    metric = ("fastgen_operator_recommended_replicas", f"chat/{space.name}")
    assert operator.metrics()[metric] >= 2
    # As a HorizontalPodAutoscaler or a person does.
    space.kubectl("scale", "fgd/chat", "--replicas=2")
    eventually(lambda: space.get("deployment", "chat")["spec"]["replicas"] == 2, within=20, what="two replicas")
    # Taken over: the autoscaler starts from the number that runs.
    space.patch("fgd/chat", {"spec": {"replicas": None, "autoscaling": {"mode": "Auto", "minReplicas": 2}}})
    eventually(lambda: desired(space) >= 2, within=20, what="autoscaling")
    assert "recommendedReplicas" not in status(space)["autoscaling"]


def test_turning_autoscaling_off_and_on_changes_nothing_but_the_replicas(space: Space) -> None:
    space.apply(autoscaled(minReplicas=1))
    space.make_ready()
    space.wait_condition("Ready", "True")
    before = space.get("deployment", "chat")["spec"]
    space.apply(resource(engine=ENGINE, replicas=2))
    space.make_ready(count=2)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    assert space.get("deployment", "chat")["spec"] == {**before, "replicas": 2}
    space.apply(autoscaled(minReplicas=1))
    space.wait_condition("ScalingActive", "False")
    assert space.get("deployment", "chat")["spec"] == {**before, "replicas": 2}
    assert len(space.items("replicasets")) == 1, "no pod is replaced"


def test_a_fleet_without_autoscaling_is_measured(space: Space, operator: OperatorProcess, engines: Engines) -> None:
    space.apply(resource(engine=ENGINE, replicas=1))
    assert space.wait_condition("ScalingActive", "False")["reason"] == "ScalingDisabled"
    assert space.wait_condition("ScalingLimited", "False")["reason"] == "ScalingDisabled"
    (engine,) = engines(space, 1)
    engine.prompt_rate = 0.3 * PROMPT_RATE
    capacity = eventually(lambda: status(space).get("capacity"), within=60, what="the capacity")
    assert capacity is not None
    assert capacity["source"] == "StepModel"
    space.wait_condition("ReplicasUniform", "True", "NoStragglers")
    age = ("fastgen_operator_scrape_age_seconds", f"chat/{space.name}")
    assert age in operator.metrics()
    eventually(lambda: status(space).get("supply", {}).get("ready") == 1, within=20, what="the supply")


def test_a_replica_that_waits_for_a_node_does_not_make_the_others_unready(
    space: Space, operator: OperatorProcess
) -> None:
    space.apply(autoscaled(minReplicas=2))
    space.make_ready(count=2)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    space.patch("fgd/chat", {"spec": {"autoscaling": {"minReplicas": 3}}})
    pods = space.wait_pods(3)
    waits = next(pod for pod in pods if not pod.get("status", {}).get("containerStatuses"))
    space.set_unschedulable(waits, NO_GPU)
    space.wait_condition("Ready", "False", "Unschedulable")
    space.wait_condition("ScalingActive", "False", "NoMetrics")
    # The status has three at once. Only if the autoscaler has decided on three does it keep them without metrics.
    decided = ("fastgen_operator_recommended_replicas", f"chat/{space.name}")
    eventually(lambda: operator.metrics().get(decided) == 3, within=20, what="a decision for three")
    # Now the third replica is more than what must serve.
    space.patch("fgd/chat", {"spec": {"autoscaling": {"minReplicas": 2}}})
    condition = space.wait_condition("Ready", "True", "ScalingUp")

    def waiting() -> list[str]:
        listed = status(space)["supply"]["pods"]
        return [pod["name"] for pod in listed if pod["state"] == "Unschedulable"]

    eventually(lambda: waiting() == [waits["metadata"]["name"]], within=20, what="the pod in the supply")
    assert condition["message"] == f"2 of 3 replicas ready; pod {waits['metadata']['name']}: {NO_GPU}"
    assert space.condition("PodsScheduled")["status"] == "False"
