"""The capacity of replicas, and stragglers. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastgen_operator.autoscale.measure.capacity import ReplicaSpeeds, modelled
from fastgen_operator.autoscale.measure.rates import ReplicaLoad, RequestShape, load_after
from fastgen_operator.autoscale.rules.recommend import State, recommend
from fastgen_operator.autoscale.sample import Fleet, Sample, StepCoefficients
from harness.fluid import BUDGET, GENERATED, PROMPT, RATE, policy

SHAPE = RequestShape(PROMPT, PROMPT, GENERATED)


def speeds(
    samples: dict[str, Sample],
    throughput: dict[str, float] | None = None,
    *,
    revisions: dict[str, str] | None = None,
    before: ReplicaSpeeds | None = None,
    begin: float = 0.0,
    seconds: float = 600.0,
) -> ReplicaSpeeds:
    """Return the speeds after `seconds` of these samples; `throughput` are tokens per second under a backlog."""
    found, rules = before or ReplicaSpeeds(), policy(inter_token_seconds=1.0, max_sequences=1000)
    time, loads = begin, dict[str, ReplicaLoad]()
    while time <= begin + seconds:
        for pod, plain in samples.items():
            done = (throughput or {}).get(pod)
            backlog = {} if done is None else {"prefill_tokens": done * time, "backlog_tokens": 1e6}
            loads[pod] = load_after(loads.get(pod), replace(plain, time=time, **backlog))  # type: ignore[arg-type]
        found = found.observe(loads, revisions or {}, SHAPE, rules, time)
        time += rules.scrape_seconds
    return found


def told(found: ReplicaSpeeds) -> tuple[object, ...]:
    assert found.capacity is not None
    return found.capacity.tokens_per_second, found.capacity.token_budget, found.capacity.source


def sample(**values: object) -> Sample:
    plain = Sample(
        time=0.0, token_budget=BUDGET, kv_capacity_tokens=1e6, step_model=StepCoefficients(0.02, 0.0001, 0.0)
    )
    return replace(plain, **values)  # type: ignore[arg-type]


def test_capacity_without_bounds_is_that_of_full_steps() -> None:
    assert modelled(sample(), SHAPE, 1.0, 1000) == pytest.approx(RATE)


def test_capacity_is_limited_to_steps_that_meet_the_inter_token_target() -> None:
    # 30 ms leave 10 ms for tokens, enough for 100 of them.
    assert modelled(sample(), SHAPE, 0.03, 1000) == pytest.approx(100 / 0.03)


def test_a_target_that_no_step_can_meet_is_ignored() -> None:
    assert modelled(sample(), SHAPE, 0.01, 1000) == pytest.approx(RATE)


def test_capacity_is_bounded_by_sequences_and_by_the_kv_cache() -> None:
    per_sequence = 1 + PROMPT / GENERATED
    ten = 10 * per_sequence / (0.02 + 0.0001 * 10 * per_sequence)
    assert modelled(sample(), SHAPE, 1.0, 10) == pytest.approx(ten)
    room = 10 * (PROMPT + GENERATED / 2) / 0.8
    assert modelled(sample(kv_capacity_tokens=room), SHAPE, 1.0, 1000) == pytest.approx(ten)


def test_a_step_model_fitted_to_one_step_size_is_ignored() -> None:
    assert modelled(sample(step_model=StepCoefficients(0.0, 0.01, 0.0)), SHAPE, 1.0, 100) is None
    assert modelled(sample(step_model=StepCoefficients(0.0, 0.01, 1e-6)), SHAPE, 1.0, 100) is not None, (
        "a fit of several sizes"
    )
    assert told(speeds({"a": sample(step_model=StepCoefficients(0.0, 0.0, 0.0))}, {"a": 700.0})) == (
        pytest.approx(700.0),
        512,
        "Throughput",
    )


def test_long_prompts_lower_the_capacity_by_their_attention() -> None:
    costs = StepCoefficients(0.02, 0.0001, 0.0, 1e-8)
    plain, sized = sample(), sample(step_model=costs)
    fits = RequestShape(BUDGET, BUDGET, GENERATED)
    assert modelled(sized, fits, 1.0, 1000) == modelled(plain, fits, 1.0, 1000), "one chunk without a context"
    # Chunks of 512 tokens begin after 0 to 9,728 tokens, on average after 4,864. Those tokens add 48.6 µs to 100.
    long = RequestShape(20 * BUDGET, 20 * BUDGET, 0.0)
    slower = (0.02 + BUDGET * 1e-4) / (0.02 + BUDGET * (1e-4 + 4864e-8))
    rate = modelled(plain, long, 1.0, 1000)
    assert rate is not None
    assert modelled(sized, long, 1.0, 1000) == pytest.approx(rate * slower, rel=0.001)
    cached = RequestShape(100.0, 10_100.0, GENERATED)
    rate, lower = modelled(plain, cached, 1.0, 1000), modelled(sized, cached, 1.0, 1000)
    assert rate is not None
    assert lower is not None
    assert lower < 0.85 * rate, "cached tokens are not computed, but they are the context"


def test_measured_throughput_caps_the_step_model() -> None:
    assert told(speeds({"a": sample()}, {"a": RATE / 2})) == (pytest.approx(RATE / 2), 512, "Throughput")


def test_a_replica_that_processes_none_of_its_backlog_has_an_unknown_capacity() -> None:
    """Its measured throughput is 0, and it has no fitted step model."""
    state = State()
    for time in (0.0, 5.0, 10.0):
        stuck = Sample(time=time, backlog_tokens=1e5, token_budget=512)
        made, state = recommend(policy(), state, Fleet(replicas=1, ready=frozenset({"a"}), samples={"a": stuck}), time)
    assert made.hold is not None
    assert (made.replicas, made.hold.reason, state.speeds.capacity) == (1, "CapacityUnknown", None)


def test_a_throughput_of_zero_does_not_cap_the_step_model() -> None:
    assert told(speeds({"a": sample()}, {"a": 0.0})) == (pytest.approx(RATE), 512, "StepModel")


def test_one_slow_replica_is_a_straggler_and_does_not_change_the_capacity() -> None:
    """Its own requests queue up, so it is the only replica whose throughput is seen under a backlog."""
    slow = sample(step_model=StepCoefficients(0.06, 0.0003, 0.0))
    for others in (["b"], ["b", "c", "d", "e"]):
        found = speeds({"a": slow, **dict.fromkeys(others, sample())}, {"a": RATE / 6})
        assert told(found) == (pytest.approx(RATE), 512, "StepModel")
        (straggler,) = found.stragglers
        assert straggler.pod == "a"
        assert straggler.share == pytest.approx(1 / 6)


def test_a_straggler_recovers_above_sixty_percent() -> None:
    def at(share: float, before: ReplicaSpeeds, time: float) -> ReplicaSpeeds:
        slow = sample(step_model=StepCoefficients(0.02 / share, 0.0001 / share, 0.0))
        return speeds({"a": slow, "b": sample(), "c": sample()}, before=before, begin=time)

    found = ReplicaSpeeds()
    for index, (share, straggles) in enumerate([(0.55, False), (0.45, True), (0.55, True), (0.65, False)]):
        found = at(share, found, 1000.0 * index)
        assert bool(found.stragglers) is straggles, share


def test_replicas_of_another_revision_are_no_stragglers() -> None:
    slow = sample(step_model=StepCoefficients(0.06, 0.0003, 0.0))
    fleet = {"a": slow, "b": sample(), "c": sample()}
    assert speeds(fleet, revisions={"a": "large", "b": "small", "c": "small"}).stragglers == ()
    assert speeds(fleet, revisions={"a": "small", "b": "small", "c": "small"}).stragglers != ()


def test_the_first_fits_of_a_replica_do_not_make_it_a_straggler() -> None:
    slow = sample(step_model=StepCoefficients(0.2, 0.001, 0.0))
    assert speeds({"a": slow, "b": sample(), "c": sample()}, seconds=30.0).stragglers == ()
    assert speeds({"a": slow, "b": sample(), "c": sample()}, seconds=90.0).stragglers != ()
