"""The arrivals of the last days by time of day, in bounded memory. Pure.

A day is divided into bins, whose mean rates are kept for seven days and the one in progress. What a time of day usually
brings is the lower median over the earlier days of the same kind: workdays, or weekends. So the load of a single day,
such as the retries after an outage, is not usual. Days and times are in UTC: when daylight saving moves the load by an
hour, what is usual follows after some days.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS, Arrivals
from fastgen_operator.autoscale.rehearsal.codes import decoded, encoded, from_text, to_text

# A week has at least two workdays and two days of a weekend.
EARLIER_DAYS: Final = 7
# 1970-01-01 was the fourth day of its week.
_FIRST_WEEKDAY: Final = 3
_WORKDAYS: Final = 5
# A bin is known if at least this share of its slots is.
_LEAST_KNOWN: Final = 0.5


@dataclass(frozen=True, slots=True)
class Calendar:
    """How days are divided. Simulations have shorter days.

    Attributes:
        bin_seconds: length of a bin, a multiple of `SLOT_SECONDS`.
        bins: number of bins of a day.
    """

    bin_seconds: int = 300
    bins: int = 288

    @property
    def most_bins(self) -> int:
        """Number of bins that are kept."""
        return (EARLIER_DAYS + 1) * self.bins

    def bin_at(self, time: float) -> int:
        """Return the number since 1970 of the bin at a time in seconds since 1970."""
        return int(time // self.bin_seconds)

    def is_weekend(self, number: int) -> bool:
        """Return whether the bin with that number since 1970 is on a Saturday or Sunday."""
        return (number // self.bins + _FIRST_WEEKDAY) % 7 >= _WORKDAYS


@dataclass(frozen=True, slots=True)
class Days:
    """Mean arrival rates by bin, the newest last.

    Attributes:
        bin: number of the bin in progress, since 1970; 0 before the first measurement.
        codes: the completed bins before it, two bytes each.
    """

    bin: int = 0
    codes: bytes = b""
    calendar: Calendar = field(default_factory=Calendar)

    def add(self, arrivals: Arrivals) -> Days:
        """Return the days with the bins that the newest slot of the arrivals completes.

        If that is before the bin in progress, the clock was set back: what was recorded after it is dropped.
        """
        slots = self.calendar.bin_seconds // SLOT_SECONDS
        now = arrivals.slot // slots
        if now == self.bin:
            return self
        if now < self.bin:
            return replace(self, bin=now, codes=self.codes[: max(0, len(self.codes) - 2 * (self.bin - now))])
        rates = arrivals.rates()
        oldest = arrivals.slot - len(rates)
        begin = max(now - self.calendar.most_bins, self.bin or oldest // slots)
        means = [_mean(rates, number * slots - oldest, slots) for number in range(begin, now)]
        return replace(self, bin=now, codes=(self.codes + encoded(means))[-2 * self.calendar.most_bins :])

    def history(self) -> History:
        """Return what is recorded."""
        return History(self.calendar, self.bin, decoded(self.codes))

    def encode(self) -> str:
        """Return the completed bins as text, for the status."""
        return to_text(self.bin, self.codes)

    @classmethod
    def decode(cls, text: str, calendar: Calendar) -> Days:
        """Return the days of `encode`; raise ValueError if the text is not of this version, or damaged."""
        return cls(*from_text(text, calendar.most_bins), calendar)


@dataclass(frozen=True, slots=True)
class History:
    """The recorded rates, in forward tokens per second; None where unknown.

    Attributes:
        now: number of the bin in progress; `rates` are those of the bins before it.
    """

    calendar: Calendar
    now: int
    rates: Sequence[float | None]

    def rate(self, number: int) -> float | None:
        """Return the rate of a bin."""
        index = number - self.now + len(self.rates)
        return self.rates[index] if 0 <= index < len(self.rates) else None

    def usual(self, number: int, before: int, least: int) -> float | None:
        """Return what is usual for a bin; None if it is unknown.

        Args:
            before: only bins before this one are taken into account.
            least: this many days must be known.
        """
        found = []
        for day in range(1, EARLIER_DAYS + 1):
            earlier = number - day * self.calendar.bins
            is_same_kind = self.calendar.is_weekend(earlier) == self.calendar.is_weekend(number)
            if is_same_kind and earlier < before and (rate := self.rate(earlier)) is not None:
                found.append(rate)
        return sorted(found)[(len(found) - 1) // 2] if len(found) >= max(1, least) else None


def _mean(rates: Sequence[float | None], begin: int, slots: int) -> float | None:
    """Return the mean of the slots of a bin; None if too few are known."""
    known = [rate for rate in rates[max(0, begin) : max(0, begin + slots)] if rate is not None]
    return math.fsum(known) / len(known) if known and len(known) >= _LEAST_KNOWN * slots else None
