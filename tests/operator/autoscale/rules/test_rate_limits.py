"""Scaling policies: how fast the load may change the number of replicas. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen_operator.api.autoscaling import Autoscaling
from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.rules.rate_limits import RateLimits, Scaling, rate_limits_of
from fastgen_operator.autoscale.sample import Sample, StepCoefficients
from fastgen_operator.autoscale.watchlist import Record, Subject
from harness.fluid import policy
from harness.objects import pod_with


def limits(**autoscaling: Any) -> RateLimits:
    return rate_limits_of(Autoscaling.model_validate({"maxReplicas": 100, **autoscaling}))


def pods(value: int, seconds: int = 600) -> dict[str, Any]:
    return {"type": "Pods", "value": value, "periodSeconds": seconds}


def percent(value: int, seconds: int = 600) -> dict[str, Any]:
    return {"type": "Percent", "value": value, "periodSeconds": seconds}


@pytest.mark.parametrize(
    ("rules", "current", "wanted", "allowed"),
    [
        ({}, 1, 50, 50),
        ({}, 50, 1, 1),
        ({"scaleUp": {"policies": [pods(3)]}}, 4, 50, 7),
        ({"scaleUp": {"policies": [pods(3)]}}, 4, 6, 6),
        ({"scaleUp": {"policies": [percent(50)]}}, 5, 50, 8),
        ({"scaleUp": {"policies": [pods(3), percent(10)]}}, 4, 50, 7),
        ({"scaleUp": {"policies": [pods(3), percent(10)], "selectPolicy": "Min"}}, 4, 50, 5),
        ({"scaleUp": {"selectPolicy": "Disabled"}}, 4, 50, 4),
        ({"scaleUp": {"policies": [pods(3)]}}, 50, 4, 4),
        ({"scaleDown": {"policies": [pods(3)]}}, 10, 1, 7),
        ({"scaleDown": {"policies": [percent(25)]}}, 10, 1, 7),
        ({"scaleDown": {"policies": [pods(1), percent(50)]}}, 10, 1, 5),
        ({"scaleDown": {"policies": [pods(1), percent(50)], "selectPolicy": "Min"}}, 10, 1, 9),
        ({"scaleDown": {"selectPolicy": "Disabled"}}, 10, 1, 10),
    ],
)
def test_a_policy_limits_one_change(rules: dict[str, Any], current: int, wanted: int, allowed: int) -> None:
    assert limits(**rules).allowed(current, wanted, (), 0.0) == allowed


def test_changes_within_the_sliding_period_count_and_earlier_ones_do_not() -> None:
    rules = limits(scaleUp={"policies": [pods(4, 600)]})
    made = (Scaling(0.0, 3), Scaling(300.0, -1))
    # Three at the start of the period, three added and one removed since: five now.
    assert rules.allowed(5, 50, made, 301.0) == 7
    assert rules.allowed(5, 50, made, 601.0) == 10
    assert rules.kept(made, 599.0) == made
    assert rules.kept(made, 600.0) == made[1:]
    assert limits().kept(made, 300.0) == ()


def test_a_percentage_is_of_the_replicas_at_the_start_of_the_period() -> None:
    rules = limits(scaleUp={"policies": [percent(50)]}, scaleDown={"policies": [percent(50)]})
    assert rules.allowed(7, 50, (Scaling(0.0, 3),), 1.0) == 7
    assert rules.allowed(5, 50, (Scaling(0.0, 1),), 1.0) == 6
    assert rules.allowed(9, 1, (Scaling(0.0, -3),), 1.0) == 6


def test_more_than_allowed_since_the_bounds_changed_removes_none() -> None:
    rules = limits(scaleUp={"policies": [pods(1)]})
    assert rules.allowed(9, 50, (Scaling(0.0, 8),), 1.0) == 9


def loaded_fleet(replicas: int, rules: RateLimits, **bounds: float) -> Subject:
    views = tuple(pod_with(f"chat-{n}", scheduled_at=0.0, started_at=0.0, ready_since=1.0) for n in range(replicas))
    return Subject(
        uid="u",
        policy=policy(**bounds),
        model_name="m",
        replicas=replicas,
        pods=views,
        rate_limits=rules,
    )


def busy(replicas: int, now: float) -> dict[str, Sample | None]:
    sample = Sample(
        time=now,
        arrived_tokens=10_000 * now,
        backlog_tokens=500_000,
        token_budget=512,
        step_model=StepCoefficients(0.02, 0.0001, 0.0),
    )
    return dict.fromkeys((f"chat-{n}" for n in range(replicas)), sample)


def test_the_load_adds_no_more_than_the_policies_allow_and_the_limit_is_reported() -> None:
    rules, record = limits(scaleUp={"policies": [pods(2, 600)]}), Record("u")
    decisions: list[Decision] = []
    size, now = 1, 0.0
    while now < 1300:
        now += 5.0
        record.update(loaded_fleet(size, rules), busy(size, now), now, now)
        assert record.decision is not None
        decisions.append(record.decision)
        size = record.decision.replicas
    sizes = [decision.replicas for decision in decisions]
    first = sizes.index(3)
    second = next(n for n, size in enumerate(sizes) if size > 3)
    assert (second - first) * 5 == 600
    assert max(sizes[:second]) == 3
    assert sizes[-1] == 7
    waiting = decisions[first + 10]
    assert waiting.limit is not None
    assert waiting.limit.reason == "RateLimited"
    assert waiting.limit.message == "spec.autoscaling.scaleUp allows 3 replicas now, and the load requires more"
    assert len({decision.change for decision in decisions[first + 1 : second]}) == 1, "no change, no other reason"


def test_bounds_are_not_limited() -> None:
    rules, record = limits(scaleUp={"selectPolicy": "Disabled"}), Record("u")
    record.update(loaded_fleet(1, rules), busy(1, 5.0), 5.0, 5.0)
    record.update(loaded_fleet(1, rules, min_replicas=6), busy(1, 10.0), 10.0, 10.0)
    assert record.decision is not None
    assert record.decision.replicas == 6


def test_when_scaling_down_is_enabled_again_the_next_step_does_not_wait() -> None:
    record = Record("u")
    sizes = []
    for round_number in range(1, 62):
        now = 5.0 * round_number
        rules = limits(scaleDown={"selectPolicy": "Disabled"}) if round_number < 61 else limits()
        idle = Sample(time=now, token_budget=512, step_model=StepCoefficients(0.02, 0.0001, 0.0))
        samples: dict[str, Sample | None] = dict.fromkeys((f"chat-{n}" for n in range(4)), idle)
        record.update(loaded_fleet(4, rules, down_window=20), samples, now, now)
        assert record.decision is not None
        sizes.append(record.decision.replicas)
        assert record.decision.limit is None or record.decision.limit.reason != "RateLimited"
    assert sizes == [4] * 60 + [3]
