"""Token rates between two scrapes, the mean request, and sliding windows. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen_operator.autoscale.measure.averages import WindowMaximum
from fastgen_operator.autoscale.measure.demand import arriving_tokens
from fastgen_operator.autoscale.measure.rates import RequestSums, rates_between
from fastgen_operator.autoscale.sample import Sample


def test_a_counter_that_decreased_was_reset() -> None:
    before = Sample(time=0.0, arrived_tokens=2e6, prefill_tokens=1e6, decode_tokens=1e5, token_budget=512)
    after = Sample(time=10.0, arrived_tokens=3000, prefill_tokens=2000, decode_tokens=100, token_budget=512)
    flow = rates_between(before, after)
    assert (flow.computed, flow.decoded, arriving_tokens(flow)) == (200, 10, 300)


def test_prompts_that_clients_cancel_are_demand() -> None:
    """They leave the backlog without being computed: the growth of what is computed and queued would not show them."""
    before = Sample(time=0.0, arrived_tokens=1000, prefill_tokens=1000)
    after = Sample(time=10.0, arrived_tokens=9000, prefill_tokens=3000, cancelled_tokens=6000, ended_prompt_tokens=6000)
    assert arriving_tokens(rates_between(before, after)) == 800


def test_cancelled_prompts_do_not_make_the_mean_response_shorter() -> None:
    served = Sample(
        time=10.0, arrived_tokens=2000, prefill_tokens=1000, ended_requests=2, ended_prompt_tokens=1000,
        ended_generated_tokens=200,
    )  # fmt: skip
    cancelled = replace(served, ended_requests=20, ended_prompt_tokens=10_000, cancelled_tokens=9000)
    for after in (served, cancelled):
        shape = RequestSums().add([rates_between(Sample(time=0.0), after)]).mean
        assert (shape.prompt, shape.generated) == pytest.approx((500, 100))
    assert RequestSums().add([rates_between(served, replace(cancelled, time=20.0))]) == RequestSums()


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 100)), max_size=60), st.floats(1, 500))
def test_a_window_maximum_covers_its_window_with_few_entries(steps: list[tuple[float, float]], window: float) -> None:
    peaks, now, seen = WindowMaximum(), 0.0, []
    for seconds, value in steps:
        now += seconds
        seen.append((now, value))
        peaks = peaks.add(now, value, window)
        assert peaks.value >= max(value for time, value in seen if time > now - window)
        assert peaks.value <= max(value for time, value in seen if time > now - 1.02 * window - 1e-6)
    assert len(peaks.entries) <= 103
