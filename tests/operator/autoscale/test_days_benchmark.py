"""The benchmark of repeated days: days are equal, and only the last one counts."""

from __future__ import annotations

import pytest
from benchmarks.autoscaling.days import last_day, repeated
from benchmarks.autoscaling.device import A100_8B
from benchmarks.autoscaling.policies.fixed import Fixed
from benchmarks.autoscaling.replica import Engine, Targets
from benchmarks.autoscaling.scenarios import SITUATIONS, cluster_of
from benchmarks.autoscaling.simulation import Scenario, simulate
from benchmarks.autoscaling.traces import WARM_UP

LENGTH = 120.0


def test_the_course_of_a_day_repeats() -> None:
    arrivals = repeated(lambda time: 10.0 if time < LENGTH / 2 else 0.0, 2, LENGTH).arrivals(1)
    times = [(arrival.time - WARM_UP) % LENGTH for arrival in arrivals if arrival.time >= WARM_UP]
    assert times
    assert max(times) < LENGTH / 2
    assert max(arrival.time for arrival in arrivals) > WARM_UP + LENGTH


def test_only_the_last_day_counts() -> None:
    trace = repeated(lambda _: 8.0, 2, LENGTH)
    scenario = Scenario(
        trace=trace, engine=Engine(A100_8B, Targets(1.0, 0.050)), cluster=cluster_of(SITUATIONS[0], 30.0), begin=4
    )
    run = simulate(scenario, Fixed(4))
    attained, hours = last_day(run, LENGTH)
    assert hours == pytest.approx(4 * LENGTH / 3600)
    begin = trace.seconds - LENGTH
    counted = [row for row in run.log.served if row[0] >= begin]
    assert len(counted) < len(run.log.served) / 2
    in_time = [met and first - arrival <= 1.0 for arrival, first, _, met in counted]
    assert attained == pytest.approx(sum(in_time) / len(in_time))
