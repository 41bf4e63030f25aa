"""The bounded queue: requests beyond it are refused before anything of them reaches the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastgen.engine.in_flight import InFlight
from fastgen.server.http.errors import APIError
from fastgen.server.http.request_context import current

_MOST_RETRY_SECONDS = 60


class Admission:
    """Lets requests in while fewer than `most_queued` wait for a place among the running ones."""

    def __init__(self, most_queued: int) -> None:
        self.most_queued = most_queued

    def admit(self, in_flight: InFlight, request_ids: Sequence[str]) -> None:
        """Keeps places in the queue for the generations of one HTTP request, all or none, until they are sent.

        Raises:
            APIError: 429 when they would not fit in the queue.
        """
        in_flight.promise(request_ids)
        # A request may end before its generations are sent: its client is gone, or another check refuses it.
        current().at_end(lambda: in_flight.withdraw(request_ids))
        queued = in_flight.num_queued
        if queued <= self.most_queued:
            return
        in_flight.withdraw(request_ids)
        raise APIError(
            429,
            f"the queue is full: {queued - len(request_ids)} requests are waiting; try again later",
            code="queue_full",
            retry_after=retry_after(self.most_queued, in_flight.ended_per_second),
        )


def retry_after(most_queued: int, ended_per_second: float) -> int:
    """Seconds until half of a full queue has been worked off at this rate: there is room then, and still work."""
    half = max(1.0, most_queued / 2)
    seconds = half / ended_per_second if ended_per_second > 0 else _MOST_RETRY_SECONDS
    return max(1, min(_MOST_RETRY_SECONDS, math.ceil(seconds)))
