"""Recorded arrivals: exact where measured, unknown where not, in bounded memory, and kept over restarts."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen_operator.api.status import LearningStatus
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS, SLOTS, Arrivals

BEGIN = 1.7e9 - 1.7e9 % SLOT_SECONDS
# What the record may take for each deployment.
MOST_BYTES = 100 * 1024


def recorded(rates: Sequence[float | None], every: float = 5.0) -> Arrivals:
    """Return the arrivals of one rate for each slot, scraped every few seconds."""
    arrivals = Arrivals()
    for slot, rate in enumerate(rates):
        for scrape in range(int(SLOT_SECONDS / every)):
            arrivals = arrivals.add(BEGIN + slot * SLOT_SECONDS + scrape * every, rate)
    return arrivals.add(BEGIN + len(rates) * SLOT_SECONDS, None)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e9)), min_size=1, max_size=40))
def test_rates_are_kept_within_a_thousandth_and_gaps_stay_unknown(rates: list[float | None]) -> None:
    found = Arrivals.decode(recorded(rates).encode()).rates()
    assert len(found) == len(rates)
    for kept, rate in zip(found, rates, strict=True):
        if rate is None:
            assert kept is None
        else:
            assert kept == pytest.approx(rate, rel=1e-3, abs=1e-3)


@given(
    st.lists(
        st.tuples(st.floats(-1e4, 1e5), st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))),
        max_size=60,
    )
)
def test_memory_is_bounded_whatever_is_added_and_when(scrapes: list[tuple[float, float | None]]) -> None:
    arrivals, time = Arrivals(), BEGIN
    for step, rate in scrapes:
        time += step
        arrivals = arrivals.add(time, rate)
        assert len(arrivals.codes) <= 2 * SLOTS
        assert all(kept is None or kept >= 0 for kept in arrivals.rates())
    if arrivals.slot:
        assert Arrivals.decode(arrivals.encode()).codes == arrivals.codes


def test_rates_that_overflow_are_kept_as_the_highest() -> None:
    arrivals = Arrivals().add(BEGIN, 1.7e308).add(BEGIN + 5, 1.7e308).add(BEGIN + 15, None)
    assert arrivals.rates() == [pytest.approx(math.exp(65.534), rel=1e-3)]


def test_six_hours_that_compress_badly_fit_into_the_status() -> None:
    (limit,) = (
        each.max_length for each in LearningStatus.model_fields["arrivals"].metadata if hasattr(each, "max_length")
    )
    noise, number = [], 1
    for _ in range(2 * SLOTS):
        number = number * 48_271 % 2_147_483_647
        noise.append(float(number))
    arrivals = recorded(noise)
    assert len(arrivals.rates()) == SLOTS
    assert len(arrivals.encode()) <= limit <= MOST_BYTES
    assert None not in arrivals.rates()
    assert SLOTS * SLOT_SECONDS == 6 * 3600


def test_a_slot_has_the_mean_of_its_scrapes_that_succeeded() -> None:
    arrivals = Arrivals().add(BEGIN, 100.0).add(BEGIN + 5, None).add(BEGIN + 10, 300.0).add(BEGIN + 15, None)
    assert arrivals.rates() == [pytest.approx(200.0, rel=1e-3)]


def test_a_restart_leaves_an_unknown_gap() -> None:
    stored = recorded([1000.0, 2000.0]).encode()
    after = Arrivals.decode(stored).add(BEGIN + 5 * SLOT_SECONDS, 3000.0).add(BEGIN + 6 * SLOT_SECONDS, None)
    assert [rate is not None for rate in after.rates()] == [True, True, False, False, False, True]


def test_an_operator_that_was_away_for_a_day_knows_nothing_of_it() -> None:
    after = recorded([1000.0] * 100).add(BEGIN + 86_400, 1.0)
    assert after.rates() == [None] * SLOTS


def test_a_clock_that_is_set_back_adds_no_slot() -> None:
    before = recorded([1000.0] * 10)
    assert before.add(BEGIN, 5.0).rates() == before.rates()


@pytest.mark.parametrize("ahead", [SLOT_SECONDS, 3600, 15 * 2**59])
def test_arrivals_of_a_leader_whose_clock_was_ahead_are_continued_at_once(ahead: int) -> None:
    stored = replace(recorded([1000.0, 2000.0]), slot=int(BEGIN + ahead) // SLOT_SECONDS).encode()
    after = Arrivals.decode(stored).add(BEGIN, 3000.0).add(BEGIN + SLOT_SECONDS, None)
    assert after.rates() == pytest.approx([1000.0, 2000.0, 3000.0], rel=1e-3)
    assert after.slot == BEGIN // SLOT_SECONDS + 1


@pytest.mark.parametrize(
    "text",
    [
        "", "1.", "2.AAAA", "1.not base64", "1." + base64.b64encode(b"no zlib").decode(),
        "1." + base64.b64encode(zlib.compress(b"short")).decode(),
        "1." + base64.b64encode(zlib.compress(bytes(8))).decode(),
        "1." + base64.b64encode(zlib.compress(bytes(10_000_000))).decode(),
    ],
)  # fmt: skip
def test_damaged_text_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="arrivals"):
        Arrivals.decode(text)
