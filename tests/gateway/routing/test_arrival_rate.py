"""The moving average of arrivals."""

from __future__ import annotations

import pytest

from fastgen_gateway.routing.arrival_rate import ArrivalRate


@pytest.mark.parametrize("rate", [0.5, 3.0, 200.0])
def test_it_finds_a_constant_rate_and_forgets_it(rate: float) -> None:
    arrivals = ArrivalRate()
    assert arrivals.rate(100.0) == 0.0
    for number in range(int(100 * rate)):
        arrivals.count(100.0 + number / rate)
    assert arrivals.rate(200.0) == pytest.approx(rate, rel=0.15)
    assert arrivals.rate(300.0) < 0.001 * rate


def test_requests_at_one_moment_all_count() -> None:
    arrivals = ArrivalRate()
    for _ in range(50):
        arrivals.count(7.0)
    assert arrivals.rate(7.0) == pytest.approx(5.0)
