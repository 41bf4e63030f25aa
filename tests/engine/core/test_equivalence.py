"""Hundreds of mixed workloads: the tokens of every request equal those of its solo run."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from support.checking import check_outcome, check_step
from support.simulation import SimulatedRunner, make_engine
from support.workloads import Outcome, Workload, play, random_workload

pytestmark = pytest.mark.slow  # together over ten seconds

BLOCK = 4
WORKLOADS_PER_GROUP = 20


def run(workload: Workload, steps_in_flight: int) -> Outcome:
    runner = SimulatedRunner(workload.num_blocks, BLOCK, workload.num_host_blocks, steps_in_flight=steps_in_flight)
    engine = make_engine(
        runner, token_budget=workload.token_budget, max_sequences=workload.max_sequences, **workload.settings
    )
    outcome = play(engine, workload.arrivals, lambda e, step: check_step(e, step, workload.token_budget))
    check_outcome(outcome, workload.arrivals, engine)
    return outcome


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("group", range(4))
def test_every_completed_request_equals_its_solo_run(group: int, steps_in_flight: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(WORKLOADS_PER_GROUP):
        seed = (group * 3 + steps_in_flight) * WORKLOADS_PER_GROUP + number
        workload = random_workload(random.Random(seed), block_size=BLOCK)
        try:
            outcome = run(workload, steps_in_flight)
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {workload}") from error
        seen["swapped"] += outcome.swapped_out > 0
        seen["recomputed"] += outcome.preemptions > outcome.swapped_out
        seen["found in the cache"] += sum(outcome.cached_tokens.values()) > 0
        seen["cancelled"] += bool(outcome.cancelled)
        seen["late"] += "deadline" in outcome.finished.values()
    # The workloads must cover these cases.
    for what in ("swapped", "recomputed", "found in the cache", "cancelled", "late"):
        assert seen[what] >= WORKLOADS_PER_GROUP // 20, f"only {seen[what]} of the workloads: {what}"
