"""What becomes of a canary, from its state, the measurements and the time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_operator.api.rollout import CanaryRollout
from fastgen_operator.canary.canary import (
    EVIDENCE_LIMIT,
    LEAST_REQUESTS,
    SLOWER_FIRST_TOKEN,
    SLOWER_GAP,
    Canary,
    Trial,
    next_canary,
    num_pods,
)
from fastgen_operator.canary.outcomes import Evidence, Outcomes

START = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
ROLLOUT = CanaryRollout.model_validate(
    {"steps": [{"percent": 10, "minutes": 5}, {"percent": 50, "minutes": 10}], "analysis": {"maxErrorPercent": 2}}
)
TRIAL = Trial(
    rollout=ROLLOUT,
    wanted="new",
    stable="old",
    is_rolled_out=True,
    can_start=True,
    replicas=4,
    deadline=timedelta(minutes=30),
)
GOOD = Outcomes(requests=100.0, errors=0.0, first_tokens=100.0, first_token_seconds=10.0, gaps=1000.0, gap_seconds=20.0)


def evidence(step_started: datetime = START, canary: Outcomes = GOOD, stable: Outcomes = GOOD) -> Evidence:
    return Evidence("new", step_started, canary, stable)


def after(before: Canary | None, now: datetime, **changes: Any) -> Canary:
    found = next_canary(before, replace(TRIAL, **changes), now)
    assert found is not None
    return found


def measured(step: int = 0, **changes: Any) -> Canary:
    """Return a canary whose pods of a step have been ready since `START`."""
    percent = ROLLOUT.steps[step].percent
    made = Canary(revision="new", step=step, percent=percent, step_started=START, measured_since=START)
    return replace(made, **changes)


def test_a_good_revision_passes_each_step_and_replaces_the_pods() -> None:
    state = after(None, START)
    assert (state.step, state.percent, state.outcome) == (0, 0, None)
    assert after(state, START + MINUTE) == state, "no pod is ready"
    state = after(state, START + 2 * MINUTE, ready=1)
    assert (state.percent, state.measured_since) == (10, START + 2 * MINUTE)
    assert after(state, START + 6 * MINUTE, ready=1, evidence=evidence()) == state, "not five minutes yet"
    state = after(state, START + 7 * MINUTE, ready=1, evidence=evidence())
    assert (state.step, state.percent, state.measured_since) == (1, 10, None), "until more pods are ready"
    assert after(state, START + 8 * MINUTE, ready=1, evidence=evidence()) == state
    state = after(state, START + 9 * MINUTE, ready=2, evidence=evidence())
    assert (state.step, state.percent) == (1, 50)
    assert after(state, START + 20 * MINUTE, ready=2, evidence=evidence()).outcome is None, "of another step"
    state = after(state, START + 20 * MINUTE, ready=2, evidence=evidence(START + 7 * MINUTE))
    assert (state.outcome, state.percent) == ("Promoted", 50)
    assert after(state, START + 21 * MINUTE) == state, "until the Deployment has it"
    assert after(state, START + 22 * MINUTE, stable="new", is_rolled_out=False) == state, "and all pods have it"
    assert next_canary(state, replace(TRIAL, stable="new"), START + 30 * MINUTE) is None


FAULTS: list[tuple[str, Outcomes, str, str]] = [
    ("errors", replace(GOOD, errors=3.0), "CanaryFailsRequests", "3 of 100 requests failed, more than 2 %"),
    ("errors of few", replace(GOOD, requests=3.0, errors=3.0), "CanaryFailsRequests", "3 of 3 requests failed"),
    (
        "first token",
        replace(GOOD, first_token_seconds=21.0),
        "CanaryTooSlow",
        "the mean first token is 210 ms, and 100 ms with the present revision",
    ),
    (
        "gaps",
        replace(GOOD, gap_seconds=31.0),
        "CanaryTooSlow",
        "the mean time between tokens is 31 ms, and 20 ms with the present revision",
    ),
]


@pytest.mark.parametrize(("outcomes", "reason", "words"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_bad_revision_is_rolled_back_at_once(outcomes: Outcomes, reason: str, words: str) -> None:
    found = after(measured(), START + timedelta(seconds=10), ready=1, evidence=evidence(canary=outcomes))
    assert (found.outcome, found.percent, found.reason) == ("RolledBack", 0, reason)
    assert words in found.message


FINE: list[tuple[str, Outcomes, Outcomes]] = [
    ("one stray error", replace(GOOD, requests=20.0, errors=2.0), GOOD),
    ("few slow first tokens", replace(GOOD, first_tokens=LEAST_REQUESTS - 1, first_token_seconds=500.0), GOOD),
    ("few slow gaps", replace(GOOD, gaps=99.0, gap_seconds=500.0), GOOD),
    (
        "little to compare with",
        replace(GOOD, first_token_seconds=50.0),
        replace(GOOD, first_tokens=3.0, first_token_seconds=0.3),
    ),
    ("a cold prefix cache", replace(GOOD, first_token_seconds=10.0 * SLOWER_FIRST_TOKEN), GOOD),
    ("a little slower", replace(GOOD, gap_seconds=20.0 * SLOWER_GAP), GOOD),
]


@pytest.mark.parametrize(("canary", "stable"), [row[1:] for row in FINE], ids=[row[0] for row in FINE])
def test_noise_rolls_nothing_back(canary: Outcomes, stable: Outcomes) -> None:
    assert after(measured(), START + MINUTE, ready=1, evidence=evidence(canary=canary, stable=stable)).outcome is None


def test_limits_hold_without_a_comparison() -> None:
    analysis = {"compareWithStable": False, "maxFirstTokenMilliseconds": 99, "maxInterTokenMilliseconds": 30}
    rollout = CanaryRollout.model_validate({"steps": [{"percent": 10, "minutes": 5}], "analysis": analysis})
    slow = replace(GOOD, gap_seconds=31.0, first_token_seconds=9.0)
    found = after(measured(), START + MINUTE, rollout=rollout, ready=1, evidence=evidence(canary=slow))
    assert found.message == "the mean time between tokens is 31 ms, more than 30 ms"
    found = after(measured(), START + MINUTE, rollout=rollout, ready=1, evidence=evidence())
    assert found.message == "the mean first token is 100 ms, more than 99 ms"
    free = CanaryRollout.model_validate(
        {"steps": [{"percent": 10, "minutes": 5}], "analysis": {"compareWithStable": False}}
    )
    assert after(measured(), START + MINUTE, rollout=free, ready=1, evidence=evidence(canary=slow)).outcome is None


def test_a_step_without_requests_waits_and_says_so_but_not_forever() -> None:
    least = timedelta(minutes=5)
    for known in (None, evidence(canary=Outcomes()), evidence(canary=replace(GOOD, first_tokens=LEAST_REQUESTS - 1))):
        found = after(measured(), START + least + EVIDENCE_LIMIT, ready=1, evidence=known)
        assert found.outcome is None
        assert "waits for 20 requests with a first token" in found.message
        late = after(found, START + least + EVIDENCE_LIMIT + timedelta(seconds=1), ready=1, evidence=known)
        assert (late.outcome, late.reason) == ("RolledBack", "CanaryUntested")
        assert "within 65 min: send requests to the gateway, or raise percent" in late.message


def test_pods_that_do_not_become_ready_are_rolled_back_with_their_state() -> None:
    waiting = after(None, START)
    found = after(waiting, START + timedelta(minutes=30), unready="pod x: no node")
    assert found.outcome is None
    found = after(waiting, START + timedelta(minutes=30, seconds=1), unready="pod x: no node")
    assert (found.reason, found.message) == ("CanaryNotReady", "not ready within 1800 s: pod x: no node")


def test_a_crash_is_rolled_back() -> None:
    found = after(measured(), START + MINUTE, ready=0, crash="the engine of pod x ended")
    assert (found.reason, found.message) == ("CanaryCrashed", "the engine of pod x ended")


def test_what_was_rolled_back_is_not_tried_again_until_the_spec_has_another_revision() -> None:
    rolled_back = measured(outcome="RolledBack", percent=0, reason="CanaryCrashed")
    for hours in range(100):
        assert after(rolled_back, START + timedelta(hours=hours), ready=1, evidence=evidence()) == rolled_back
    other = after(rolled_back, START, wanted="newer")
    assert (other.revision, other.step, other.outcome) == ("newer", 0, None)
    assert after(replace(other, outcome="RolledBack"), START, wanted="new").outcome is None, "it was asked for again"


def test_another_revision_starts_again_and_the_present_one_ends_the_trial() -> None:
    running = measured(1)
    newest = after(running, START + MINUTE, wanted="newest", evidence=evidence())
    assert (newest.revision, newest.step, newest.percent) == ("newest", 0, 0)
    assert next_canary(running, replace(TRIAL, wanted="old"), START) is None
    assert next_canary(running, replace(TRIAL, rollout=None), START) is None, "spec.rollout.canary was removed"


def test_what_was_measured_of_an_earlier_trial_says_nothing_about_the_next_one() -> None:
    """A revision that was rolled back is tried again after another one, at the same step."""
    again = measured(step_started=START + 10 * MINUTE, measured_since=START + 12 * MINUTE)
    bad, late = evidence(canary=replace(GOOD, errors=50.0)), START + 20 * MINUTE
    assert after(again, START + 13 * MINUTE, ready=1, evidence=bad).outcome is None
    found = after(again, late, ready=1, evidence=evidence())
    assert (found.outcome, found.step) == (None, 0)
    assert "waits for 20 requests" in found.message
    assert after(again, late, ready=1, evidence=evidence(again.step_started)).step == 1


def test_a_revision_replaces_the_pods_directly_if_none_serves() -> None:
    assert next_canary(None, replace(TRIAL, can_start=False), START) is None
    assert after(measured(), START + MINUTE, can_start=False, ready=1).outcome is None, "once it runs, it goes on"


def test_a_trial_ends_when_the_spec_has_no_replicas_but_a_rollback_is_remembered() -> None:
    for running in (after(None, START), measured()):
        assert next_canary(running, replace(TRIAL, replicas=0, can_start=False), START + MINUTE) is None
    rolled_back = measured(outcome="RolledBack", percent=0, reason="CanaryCrashed")
    assert after(rolled_back, START + MINUTE, replicas=0, can_start=False) == rolled_back


def test_fewer_steps_than_before_end_at_the_last_one() -> None:
    short = CanaryRollout.model_validate({"steps": [{"percent": 30, "minutes": 1}]})
    found = after(measured(1), START + 2 * MINUTE, rollout=short, ready=2, evidence=evidence())
    assert found.outcome == "Promoted"


def test_the_state_survives_a_restart() -> None:
    for state in (after(None, START), measured(1), measured(outcome="RolledBack", reason="X", message="why")):
        assert Canary.from_status(state.to_status()) == state
    assert Canary.from_status(None) is Canary.from_status({}) is Canary.from_status({"revision": "x"}) is None


def test_a_share_of_the_pods_is_rounded_up() -> None:
    assert [num_pods(4, percent) for percent in (1, 25, 26, 100)] == [1, 1, 2, 4]
    assert num_pods(1, 10) == 1


def test_counters_of_a_restarted_engine_count_from_zero_and_of_a_new_pod_from_its_first_scrape() -> None:
    seen = Evidence("new", START)
    seen = seen.add({"c": Outcomes(requests=1000.0, errors=7.0)}, {"s": Outcomes(requests=50.0)})
    assert (seen.canary, seen.stable) == (Outcomes(), Outcomes()), "what was before says nothing about the step"
    seen = seen.add({"c": Outcomes(requests=1010.0, errors=8.0)}, {})
    assert seen.canary == Outcomes(requests=10.0, errors=1.0)
    seen = seen.add({"c": Outcomes(requests=4.0)}, {"s": Outcomes(requests=60.0), "t": Outcomes(requests=9.0)})
    assert (seen.canary.requests, seen.stable.requests) == (14.0, 10.0), "and a missed scrape loses nothing"
    seen = seen.add({}, {"t": Outcomes(requests=10.0)})
    assert (seen.canary.requests, seen.stable.requests) == (14.0, 11.0), "pods that are gone keep their part"


COUNTS = st.builds(
    Outcomes,
    requests=st.floats(0, 1e6),
    errors=st.floats(0, 1e6),
    first_tokens=st.floats(0, 1e6),
    first_token_seconds=st.floats(0, 1e9),
    gaps=st.floats(0, 1e6),
    gap_seconds=st.floats(0, 1e9),
)
# Evidence of `START` is about the present step.
TIMES = st.sampled_from([START, START - MINUTE])
EVIDENCE = st.builds(Evidence, st.sampled_from(["a", "b", "c"]), TIMES, COUNTS, COUNTS)
TRIALS = st.builds(
    Trial,
    rollout=st.sampled_from([None, ROLLOUT, CanaryRollout.model_validate({"steps": [{"percent": 100, "minutes": 1}]})]),
    wanted=st.sampled_from(["a", "b", "c"]),
    stable=st.sampled_from(["a", "b"]),
    is_rolled_out=st.booleans(),
    can_start=st.booleans(),
    replicas=st.integers(0, 5),
    ready=st.integers(0, 5),
    unready=st.sampled_from(["", "pod x: no node"]),
    crash=st.sampled_from(["", "", "", "ended"]),
    evidence=st.none() | EVIDENCE,
    deadline=st.just(timedelta(minutes=5)),
)


def of_this_step(trial: Trial, state: Canary | None) -> Trial:
    if state is None or trial.evidence is None or trial.evidence.step_started != START:
        return trial
    return replace(trial, evidence=replace(trial.evidence, step_started=state.step_started))


WORLDS = st.lists(st.tuples(TRIALS, st.integers(-30, 3600), st.booleans()), max_size=30)


@settings(max_examples=200, deadline=None)
@given(WORLDS)
def test_whatever_happens_the_state_is_sound(world: list[tuple[Trial, int, bool]]) -> None:
    """Clocks step back, the operator restarts, specs change, pods come and go."""
    state: Canary | None = None
    now = START
    for trial, seconds, restarts in world:
        before, now = state, now + timedelta(seconds=seconds)
        state = next_canary(before, of_this_step(trial, before), now)
        if state is None:
            continue
        assert trial.rollout is not None
        assert state.revision == trial.wanted, "only what the spec asks for is tried"
        assert 0 <= state.percent <= 100
        assert (state.outcome == "RolledBack") == bool(state.reason), "a rollback has its reason"
        assert state.message
        if state.outcome == "RolledBack":
            assert state.percent == 0
        if state.percent and state.outcome is None and trial.wanted != trial.stable:
            assert state.percent in [step.percent for step in trial.rollout.steps] or state.measured_since is None
        same = before is not None and before.revision == state.revision
        if before is not None and same and before.outcome is not None:
            assert state == before, "what was decided stays"
        if before is None or not same:
            assert (state.step, state.percent, state.outcome) == (0, 0, None), "each revision begins without a share"
        elif state.step > before.step:
            assert before.measured_since is not None
            assert state.step == before.step + 1
        if restarts:
            state = Canary.from_status(state.to_status())


@settings(max_examples=100, deadline=None)
@given(WORLDS)
def test_every_trial_ends(world: list[tuple[Trial, int, bool]]) -> None:
    """After any history, a revision whose pods and requests do not change any more is decided on in time."""
    state: Canary | None = None
    now = START
    for trial, seconds, _ in world:
        now += timedelta(seconds=seconds)
        state = next_canary(state, of_this_step(trial, state), now)
    for trial in (TRIAL, replace(TRIAL, ready=4), replace(TRIAL, ready=4, evidence=evidence())):
        last = after(state, now, ready=trial.ready, evidence=trial.evidence)
        for hour in range(1, 30):
            last = after(last, now + timedelta(hours=4 * hour), ready=trial.ready, evidence=trial.evidence)
        assert last.outcome is not None
