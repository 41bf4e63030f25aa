"""The arrivals of the last hours, in bounded memory. Pure.

Time is divided into slots of `SLOT_SECONDS`. A slot without a measurement is unknown, which is not the same as without
arrivals: a gap in the scrapes, a fleet without a ready replica and a restart of the operator say nothing about the
load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from fastgen_operator.autoscale.rehearsal.codes import decoded, encoded, from_text, to_text

SLOT_SECONDS: Final = 15
# Six hours.
SLOTS: Final = 1440


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival rates by slot, the newest last.

    Attributes:
        slot: number of the slot in progress, since 1970; 0 before the first measurement.
        codes: the completed slots before it, two bytes each.
        total, count: sum and number of the rates measured in the slot in progress.
    """

    slot: int = 0
    codes: bytes = b""
    total: float = 0.0
    count: int = 0

    def add(self, time: float, rate: float | None) -> Arrivals:
        """Return the arrivals after a scrape.

        Args:
            time: seconds since 1970. If it is before the slot in progress, the clock was set back, or that of an
                earlier leader was ahead: that slot is still in progress, but at this time.
            rate: arriving forward tokens per second since the scrape before; None if unknown.
        """
        slot = int(time // SLOT_SECONDS)
        after = self._begin(slot) if slot > self.slot else replace(self, slot=slot)
        if rate is None or not math.isfinite(rate) or rate < 0:
            return after
        return replace(after, total=after.total + rate, count=after.count + 1)

    def _begin(self, slot: int) -> Arrivals:
        """Complete the slot in progress and begin another one; slots between them are unknown."""
        if not self.slot:
            return Arrivals(slot)
        completed = encoded([self.total / self.count if self.count else None])
        unknown = bytes(2 * min(SLOTS, slot - self.slot - 1))
        return Arrivals(slot, (self.codes + completed + unknown)[-2 * SLOTS :])

    def rates(self) -> list[float | None]:
        """Return the rates of the completed slots, in forward tokens per second; None where unknown."""
        return decoded(self.codes)

    def encode(self) -> str:
        """Return the completed slots as text, for the status."""
        return to_text(self.slot, self.codes)

    @classmethod
    def decode(cls, text: str) -> Arrivals:
        """Return the arrivals of `encode`; raise ValueError if the text is not of this version, or damaged."""
        return cls(*from_text(text, SLOTS))
