"""How often requests arrive, as an exponential moving average."""

from __future__ import annotations

import math
from typing import Final

# After this time a request counts 1 / e of what it counted when it arrived.
_SECONDS: Final = 10.0


class ArrivalRate:
    """The requests of a second, of about the last ten."""

    __slots__ = ("_rate", "_time")

    def __init__(self) -> None:
        self._rate, self._time = 0.0, -math.inf

    def count(self, now: float) -> None:
        """Count a request. `now` never decreases."""
        self._rate, self._time = self.rate(now) + 1 / _SECONDS, now

    def rate(self, now: float) -> float:
        """Return the requests per second."""
        return self._rate * math.exp((self._time - now) / _SECONDS)
