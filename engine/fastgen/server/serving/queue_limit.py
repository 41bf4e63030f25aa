"""The bounded queue: requests beyond it are rejected before they reach the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastgen.link.in_flight import InFlight
from fastgen.server.http.api_error import APIError
from fastgen.server.http.request_context import current

_MAX_RETRY_SECONDS = 60


def admit(in_flight: InFlight, request_ids: Sequence[str], max_queued_requests: int) -> None:
    """Reserve queue places for all generations of one HTTP request, until they are sent to the engine.

    Raises:
        APIError: 429 if they do not all fit in the queue; none is reserved then.
    """
    in_flight.reserve(request_ids)
    # The HTTP request may end before its generations are sent: its client disconnects, or another check rejects it.
    current().on_end.callback(in_flight.release, request_ids)
    if in_flight.num_queued <= max_queued_requests:
        return
    in_flight.release(request_ids)
    raise APIError(
        429,
        f"the queue has no room for {len(request_ids)} more: {in_flight.num_queued} requests are waiting, and at most "
        f"{max_queued_requests} may; try again later",
        code="queue_full",
        retry_after=retry_after(max_queued_requests, in_flight.finished_per_second),
    )


def retry_after(max_queued_requests: int, finished_per_second: float) -> int:
    """Return the seconds until half of a full queue has drained, from 1 to 60; 60 if no request has finished."""
    half = max(1.0, max_queued_requests / 2)
    seconds = half / finished_per_second if finished_per_second > 0 else _MAX_RETRY_SECONDS
    return max(1, min(_MAX_RETRY_SECONDS, math.ceil(seconds)))
