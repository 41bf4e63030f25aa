"""The utilization that follows from the requests, the replicas' speed and the first-token target. Pure."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.measure.rates import RequestShape
from fastgen_operator.autoscale.policy import policy_of
from fastgen_operator.autoscale.rules.headroom import DEVIATIONS, LEAST, MOST, derived_utilization
from harness.fluid import GENERATED, PROMPT, RATE, FluidFleet, policy


def utilization(tokens: float, rate: float = 8000.0, target: float = 1.0) -> float:
    return derived_utilization(RequestShape(0.9 * tokens, 0.9 * tokens, 0.1 * tokens), rate, target)


@given(st.floats(400.0, 3000.0), st.floats(0.5, 2.0))
def test_mean_work_and_margin_fill_the_first_token_target(tokens: float, target: float) -> None:
    used = utilization(tokens, target=target)
    seconds = tokens / 8000.0
    if LEAST < used < MOST:
        filled = used * target + DEVIATIONS * math.sqrt(2 * seconds * used * target)
        assert filled == pytest.approx(target, rel=0.01)


@given(st.floats(1.0, 50_000.0), st.floats(1.0, 4.0))
def test_longer_requests_slower_replicas_and_tighter_targets_need_more_headroom(tokens: float, times: float) -> None:
    plain = utilization(tokens)
    assert LEAST <= utilization(times * tokens) <= plain <= MOST
    assert utilization(tokens, rate=8000.0 / times) <= plain
    assert utilization(tokens, target=times) >= plain


def test_chat_requests_on_a_gpu_leave_thirty_percent_and_short_ones_less() -> None:
    assert utilization(1366.0) == pytest.approx(0.70, abs=0.02)
    assert utilization(200.0) > 0.85


def test_a_configured_utilization_overrides_the_derived_one() -> None:
    def of(**targets: int) -> tuple[float, bool]:
        autoscaling = {"maxReplicas": 8, "targets": targets}
        spec = Spec.model_validate(
            {"model": {"source": "hf://a/b"}, "engine": {"device": "cuda"}, "autoscaling": autoscaling}
        )
        made = policy_of(spec, 1, 5.0)
        return made.utilization, made.derives_utilization

    assert of(utilizationPercent=85) == (0.85, False)
    assert of()[1]


def test_a_fleet_is_sized_with_the_derived_utilization() -> None:
    wanted = derived_utilization(RequestShape(PROMPT, PROMPT, GENERATED), RATE, 0.1)
    assert wanted < 0.6
    tight = policy(first_token_seconds=0.1, derives_utilization=True)
    fleet = FluidFleet.of(1, tight, lambda _: 4.0).run(1200)
    sizing = fleet.decisions[-1].sizing
    assert sizing is not None
    assert sizing.utilization == pytest.approx(wanted, abs=0.02)
    assert fleet.sizes[-1] >= 4.0 / (wanted + 0.02)
