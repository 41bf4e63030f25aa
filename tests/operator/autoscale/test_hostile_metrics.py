"""Whatever numbers an engine reports, there is a decision about its fleet, and a status that shows it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fastgen_operator.autoscale.decide import Case, decide
from fastgen_operator.autoscale.journal import Entry, Journal, to_json
from fastgen_operator.autoscale.rules.recommend import State
from fastgen_operator.autoscale.sample import SAMPLE_METRICS, Fleet, Sample, StepCoefficients
from fastgen_operator.autoscale.scrape.exposition import parse_sample
from fastgen_operator.plan.observed import Observed
from fastgen_operator.status.autoscaling import autoscaling_status, capacity_status, stragglers_status
from harness.fluid import policy
from harness.objects import situation, stored

NUMBERS = (0.0, 5e-324, 1e-300, 1e-100, 1e-15, 1e-6, 0.5, 1.0, 1e4, 1e9, 9.9e14)


def reported(rng: random.Random, numbers: list[float], now: float) -> Sample:
    """Return the sample of a response with some of these numbers."""
    lines = [
        f'fastgen_step_model{{coefficient="{name}",model_name="chat"}} {rng.choice(numbers)}'
        for name in StepCoefficients._fields
    ]
    for name, phase in SAMPLE_METRICS:
        number = rng.choice(numbers)
        labels = f'model_name="chat",phase="{phase}"' if phase else 'model_name="chat"'
        lines.append(f"fastgen_{name}{{{labels}}} {min(1.0, number) if name.endswith('_ratio') else number}")
    return replace(parse_sample("\n".join(lines), "chat", now), time=now)


def integers(value: Any) -> Iterator[int]:
    """Yield all integers in a JSON value."""
    match value:
        case int():
            yield value
        case dict():
            yield from integers([*value.values()])
        case list() | tuple():
            for each in value:
                yield from integers(each)


@pytest.mark.parametrize("seed", range(20))
def test_a_decision_and_a_status_follow_from_any_numbers(seed: int) -> None:
    rng = random.Random(seed)
    numbers = rng.sample(NUMBERS, 4)
    rules = replace(policy(min_replicas=1, max_replicas=rng.choice([1, 1000])), derives_utilization=seed % 2 == 0)
    resource = stored(autoscaling={"minReplicas": 1, "maxReplicas": 1000})
    state, journal, now = State(), Journal(), 100.0
    for _ in range(8):
        samples = {pod: reported(rng, numbers, now) for pod in ("a", "b", "c")}
        fleet = Fleet(
            replicas=3,
            ready=frozenset(samples),
            samples=samples,
            revisions=dict.fromkeys(samples, "x"),
            start_seconds=60,
        )
        case = Case(policy=rules, fleet=fleet, now=now, state=state)
        decision, state = decide(case)
        assert 1 <= decision.replicas <= rules.max_replicas
        capacity = state.speeds.capacity
        assert capacity is None or math.isfinite(capacity.tokens_per_second)
        journal = journal.add(Entry(now, case, decision))
        seen = replace(situation(Observed(resource)), speeds=state.speeds, decision=decision)
        shown = (autoscaling_status(seen, "2026-01-01T00:00:00Z"), capacity_status(seen), stragglers_status(seen))
        assert all(number < 2**63 for number in integers(shown)), shown
        json.dumps((shown, to_json(journal)), allow_nan=False)
        now += 5.0
