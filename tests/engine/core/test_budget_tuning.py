"""Choosing the token budget from measured step times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen.core.budget_tuning import PEAK_SHARE, monotone_curve, tune_budget
from fastgen.core.step_times import StepTime, StepWork

SIZES = (16, 32, 64, 128, 256, 512, 1024)


def linear(base: float, per_token: float, sizes: tuple[int, ...] = SIZES) -> list[StepTime]:
    return [StepTime(StepWork(size), base + per_token * size) for size in sizes]


def saturating(base: float, per_token: float, saturation: int) -> list[StepTime]:
    """Memory bandwidth takes `base` however few the tokens; arithmetic dominates beyond `saturation`."""
    return [StepTime(StepWork(size), max(base, base * size / saturation) + per_token * size) for size in SIZES]


def test_the_budget_is_the_fewest_tokens_that_reach_95_percent_of_peak_throughput() -> None:
    tuned = tune_budget(linear(0.020, 0.001), target_seconds=None, minimum=1, maximum=1024)
    # n / (0.020 + 0.001 n) = 0.95 of its value at 1024 where n = 263; the next multiple of 64 above 256.
    assert tuned.token_budget == 320
    assert tuned.throughput >= PEAK_SHARE * tuned.peak
    assert tuned.bound == "peak throughput"
    assert tuned.seconds == pytest.approx(0.340)


def test_constant_step_times_give_the_largest_measured_budget() -> None:
    flat = [StepTime(StepWork(size), 0.030) for size in SIZES]
    assert tune_budget(flat, target_seconds=None, minimum=1, maximum=1024).token_budget == 1024


def test_the_budget_ends_where_throughput_saturates() -> None:
    assert tune_budget(saturating(0.02, 1e-6, 128), target_seconds=None, minimum=1, maximum=1024).token_budget == 128


def test_an_inter_token_target_lowers_the_budget() -> None:
    points = linear(0.020, 0.001)
    tuned = tune_budget(points, target_seconds=0.100, minimum=1, maximum=1024)
    assert (tuned.token_budget, tuned.bound) == (80, "inter-token target")
    assert tune_budget(points, target_seconds=10.0, minimum=1, maximum=1024).bound == "peak throughput"


def test_the_minimum_budget_overrides_the_target() -> None:
    tuned = tune_budget(linear(0.020, 0.001), target_seconds=0.001, minimum=96, maximum=1024)
    assert (tuned.token_budget, tuned.bound) == (96, "lower limit")
    assert tune_budget(linear(0.020, 0.001), target_seconds=None, minimum=1, maximum=100).token_budget == 100


def test_a_slow_outlier_does_not_change_the_budget() -> None:
    clean = linear(0.020, 0.001)
    noisy = [*clean, StepTime(StepWork(256), 3.0)]
    noisy[3] = StepTime(StepWork(128), 1.5)
    limits = {"target_seconds": None, "minimum": 1, "maximum": 1024}
    assert tune_budget([*noisy, *clean], **limits) == tune_budget(clean, **limits)  # type: ignore[arg-type]
    assert monotone_curve(noisy)[3].seconds == clean[4].seconds, "no slower than the next larger step"


points = st.lists(
    st.builds(StepTime, st.builds(StepWork, st.integers(1, 8192)), st.floats(1e-4, 10.0)), min_size=1, max_size=12
)


@given(points, st.none() | st.floats(1e-4, 10.0), st.integers(1, 300), st.integers(300, 9000))
def test_any_curve_gives_a_budget_within_its_limits(
    measured: list[StepTime], target: float | None, minimum: int, maximum: int
) -> None:
    tuned = tune_budget(measured, target_seconds=target, minimum=minimum, maximum=maximum)
    assert minimum <= tuned.token_budget <= maximum
    curve = monotone_curve(measured)
    assert [p.seconds for p in curve] == sorted(p.seconds for p in curve)
    inside = curve[0].tokens <= tuned.token_budget <= curve[-1].tokens
    if tuned.bound == "inter-token target" and inside:
        assert target is not None
        assert tuned.seconds <= target * (1 + 1e-9)
