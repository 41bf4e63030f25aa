"""Days by time of day: exact where measured, unknown where not, in bounded memory; and what is usual for a time."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_operator.api.status import LearningStatus
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS, SLOTS, Arrivals
from fastgen_operator.autoscale.rehearsal.codes import encoded
from fastgen_operator.autoscale.rehearsal.days import EARLIER_DAYS, Calendar, Days, History

CALENDAR = Calendar()
SLOTS_OF_BIN = CALENDAR.bin_seconds // SLOT_SECONDS
# Midnight before a Thursday.
BEGIN = 20_000 * CALENDAR.bins
DAY = CALENDAR.bins

Rates = list[float | None]


def recorded(rates: Rates, days: Days | None = None, arrivals: Arrivals | None = None) -> tuple[Days, Arrivals]:
    """Return the days after one rate for each slot."""
    days, arrivals = days or Days(), arrivals or Arrivals()
    first = arrivals.slot or BEGIN * SLOTS_OF_BIN
    for slot, rate in enumerate([*rates, None]):
        arrivals = arrivals.add((first + slot) * SLOT_SECONDS, rate)
        days = days.add(arrivals)
    return days, arrivals


def history(days: list[list[float | None]], weekday: int = 0) -> History:
    """Return the history of whole days, of which the first one has this weekday, 0 for Monday."""
    rates = [rate for day in days for rate in day]
    begin = BEGIN + (weekday - datetime.fromtimestamp(BEGIN * 300, UTC).weekday()) % 7 * DAY
    return History(CALENDAR, begin + len(rates), rates)


def test_a_bin_has_the_mean_of_its_slots() -> None:
    rising: Rates = [100.0 * slot for slot in range(SLOTS_OF_BIN)]
    days, _ = recorded([*rising, *[7.0] * SLOTS_OF_BIN])
    assert days.bin == BEGIN + 2
    assert days.history().rates == pytest.approx([950.0, 7.0], rel=1e-3)


def test_a_bin_of_which_less_than_half_is_known_is_unknown() -> None:
    half = SLOTS_OF_BIN // 2
    few: Rates = [*[5.0] * (half - 1), *[None] * (half + 1)]
    enough: Rates = [*[5.0] * half, *[None] * half]
    days, _ = recorded([*few, *enough])
    assert days.history().rates == [None, pytest.approx(5.0, rel=1e-3)]


def test_a_restart_continues_from_the_status_and_completes_the_bin_in_progress() -> None:
    days, arrivals = recorded([3.0] * (SLOTS_OF_BIN + 12))
    kept = Days.decode(days.encode(), CALENDAR), Arrivals.decode(arrivals.encode())
    after, _ = recorded([3.0] * SLOTS_OF_BIN, *kept)
    assert after.history().rates == pytest.approx([3.0, 3.0], rel=1e-3)
    _, away = kept[0], kept[1].add((BEGIN + 30) * 300.0, 1.0)
    gap = kept[0].add(away)
    assert gap.history().rates == [pytest.approx(3.0, rel=1e-3), pytest.approx(3.0, rel=1e-3), *[None] * 28]


def test_a_record_without_days_begins_with_the_hours_that_are_known() -> None:
    _, arrivals = recorded([3.0] * (3 * SLOTS_OF_BIN))
    assert Days().add(arrivals).history().rates == pytest.approx([3.0] * 3, rel=1e-3)


def test_a_clock_that_is_set_back_drops_what_was_recorded_after_it() -> None:
    days, arrivals = recorded([3.0] * (10 * SLOTS_OF_BIN))
    back = arrivals.add((BEGIN + 4) * 300.0, 1.0)
    after = days.add(back)
    assert (after.bin, len(after.history().rates)) == (BEGIN + 4, 4)
    long_ago = days.add(arrivals.add(300.0, 1.0))
    assert (long_ago.bin, long_ago.codes) == (1, b"")


def test_a_clock_that_is_ahead_for_a_time_leaves_no_days_in_the_future() -> None:
    days, arrivals = recorded([3.0] * (10 * SLOTS_OF_BIN))
    ahead = arrivals.add((BEGIN + 5000) * 300.0, 1.0)
    jumped = days.add(ahead)
    assert all(rate is None for rate in jumped.history().rates)
    again = jumped.add(ahead.add((BEGIN + 11) * 300.0, 1.0))
    assert again.bin == BEGIN + 11
    assert all(again.history().rate(number) is None for number in range(BEGIN + 11, BEGIN + 6000))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(-1e6, 1e7), st.one_of(st.none(), st.floats(0, 1e300))), max_size=40))
def test_memory_is_bounded_whatever_is_added_and_when(scrapes: list[tuple[float, float | None]]) -> None:
    days, arrivals, time = Days(), Arrivals(), BEGIN * 300.0
    for seconds, rate in scrapes:
        time = max(SLOT_SECONDS, time + seconds)
        arrivals = arrivals.add(time, rate)
        days = days.add(arrivals)
        assert len(days.codes) <= 2 * CALENDAR.most_bins
    if days.bin:
        assert Days.decode(days.encode(), CALENDAR) == days


def test_eight_days_that_compress_badly_fit_into_the_status_beside_the_hours() -> None:
    (limit,) = (each.max_length for each in LearningStatus.model_fields["days"].metadata if hasattr(each, "max_length"))
    noise, number = [], 1
    for _ in range(CALENDAR.most_bins):
        number = number * 48_271 % 2_147_483_647
        noise.append(float(number))
    assert len(Days(BEGIN, encoded(noise)).encode()) <= limit
    hours = Arrivals(BEGIN, encoded(noise)[: 2 * SLOTS]).encode()
    assert limit + len(hours) <= 100 * 1024


@pytest.mark.parametrize("text", ["", "1.", "2.AAAA", "1.not base64"])
def test_damaged_text_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="arrivals"):
        Days.decode(text, CALENDAR)


def test_more_than_eight_days_are_rejected() -> None:
    too_many = Days(BEGIN, encoded([1.0] * (CALENDAR.most_bins + 1)))
    with pytest.raises(ValueError, match="arrivals"):
        Days.decode(too_many.encode(), CALENDAR)


def test_what_is_usual_is_the_lower_median_of_the_earlier_days() -> None:
    seen = history([[float(rate)] * DAY for rate in (1, 9, 2, 3)])
    assert seen.usual(seen.now, seen.now, 2) == 2.0
    assert seen.usual(seen.now, seen.now - 3 * DAY, 1) == 1.0, "only what was known then"
    assert seen.usual(seen.now, seen.now - 3 * DAY, 2) is None
    assert History(CALENDAR, BEGIN, []).usual(BEGIN, BEGIN, 0) is None


def test_one_day_with_an_outage_or_a_storm_is_not_usual() -> None:
    days: list[Rates] = [[5.0] * DAY, [500.0] * DAY, [None] * DAY, [5.0] * DAY]
    seen = history(days)
    assert seen.usual(seen.now + 7, seen.now, 2) == 5.0
    both = history([[5.0] * DAY, [500.0] * DAY])
    assert both.usual(both.now, both.now, 2) == 5.0


def test_workdays_are_compared_with_workdays_and_weekends_with_weekends() -> None:
    week = history([[10.0] * DAY] * 5 + [[1.0] * DAY] * 2)
    (monday, saturday) = (week.now, week.now + 5 * DAY)
    assert week.calendar.is_weekend(saturday)
    assert not week.calendar.is_weekend(monday)
    assert week.usual(monday, monday, 2) == 10.0
    days = [[1.0] * DAY] * 2 + [[10.0] * DAY] * 5
    later = history(days, weekday=5)
    assert later.now % DAY == 0
    assert later.calendar.is_weekend(later.now)
    assert later.usual(later.now, later.now, 2) == 1.0


def test_only_the_last_seven_days_count() -> None:
    seen = history([[50.0] * DAY] + [[None] * DAY] * EARLIER_DAYS)
    assert seen.usual(seen.now, seen.now, 1) is None
