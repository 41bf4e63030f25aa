"""An API process's view of the requests in the engine process.

Together the API processes are the engine's only clients, so they know all requests of the engine.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from fastgen.link.messages import StepReport, TokenOutput
from fastgen.link.shared_counts import Count, Counts

# Time constant of the rate of finished requests: long enough for slow generations, short enough to follow the load.
_RATE_SECONDS = 30.0

log = logging.getLogger("fastgen.link")


class Receiver(Protocol):
    """Receives the outputs of one request when they arrive. It must not block: all requests wait for it."""

    def push(self, output: TokenOutput) -> None:
        """Handle an output; the last one has a finish reason."""

    def fail(self, error: Exception | None = None) -> None:
        """Handle that there are no more outputs: `push` raised `error`, or None: the engine ended or hangs."""


class InFlight:
    """Receivers by request id, and an estimate of how many requests are queued.

    A request is reserved when the server admits it, and open from when it is sent to the engine until it ends.
    """

    def __init__(self, max_sequences: int, counts: Counts | None = None) -> None:
        self._counts = counts or Counts.of_only_process()
        self._max_sequences = max_sequences
        self._capacity = max_sequences
        self._receivers: dict[str, Receiver] = {}
        self._reserved: set[str] = set()
        self._finished = Rate(time.monotonic)

    @property
    def num_queued(self) -> int:
        """Requests of all API processes that do not run yet, including reserved ones.

        The engine runs up to `max_sequences` requests while none waits. If some wait, memory or the token budget limits
        it to as many as ran in its last step.
        """
        return max(0, self._counts.total(Count.PLACES) - self._capacity)

    @property
    def finished_per_second(self) -> float:
        """Recent rate of finished requests of all API processes, including those that this process cancelled."""
        return self._finished.per_second()

    def reserve(self, request_ids: Iterable[str]) -> None:
        """Count requests that are admitted but not sent yet."""
        self._reserved.update(request_ids)
        self._publish()

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop the reservations of requests that will not be sent."""
        self._reserved.difference_update(request_ids)
        self._publish()

    def open(self, request_id: str, receiver: Receiver) -> None:
        """Record that a request is sent now; its outputs go to `receiver`."""
        assert request_id not in self._receivers, f"request id {request_id} is in use"
        self._reserved.discard(request_id)
        self._receivers[request_id] = receiver
        self._publish()

    def close(self, request_id: str) -> bool:
        """Remove a request. Return False if it had ended already."""
        if request_id not in self._receivers:
            return False
        self._finished.add(1)
        self._end(request_id)
        return True

    def ids(self) -> list[str]:
        """Return the ids of the open requests."""
        return list(self._receivers)

    def record(self, report: StepReport) -> None:
        """Deliver the outputs of a report, and update how many requests the engine can run at once."""
        if report.num_finished:
            self._finished.add(report.num_finished)
        for output in report.outputs:
            self.deliver(output)
        stats = report.scheduler
        is_full = stats.num_waiting or stats.num_swapped
        self._capacity = stats.num_running + report.num_finished if is_full else self._max_sequences

    def deliver(self, output: TokenOutput) -> None:
        """Give an output to its request's receiver, unless the request was closed."""
        receiver = self._receivers.get(output.request_id)
        if receiver is None:
            return
        if output.finish_reason is not None:
            self._end(output.request_id)
        try:
            receiver.push(output)
        except Exception as error:  # the other requests must get their outputs
            log.exception("request %s: its output could not be handled", output.request_id)
            receiver.fail(error)

    def end_all(self) -> None:
        """Fail all open requests, because the engine has ended or hangs."""
        receivers, self._receivers = self._receivers, {}
        self._publish()
        for receiver in receivers.values():
            receiver.fail()

    def _end(self, request_id: str) -> None:
        del self._receivers[request_id]
        self._publish()

    def _publish(self) -> None:
        """Tell the other API processes how many requests this one has."""
        self._counts.set(Count.PLACES, len(self._receivers) + len(self._reserved))


class Rate:
    """Events per second, exponentially weighted with time constant `_RATE_SECONDS`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = self._updated = clock()
        self._weight = 0.0

    def add(self, count: int) -> None:
        """Record `count` events now."""
        now = self._clock()
        self._weight = self._weight * math.exp((self._updated - now) / _RATE_SECONDS) + count
        self._updated = now

    def per_second(self) -> float:
        """Return the current rate; 0 before the first event."""
        now = self._clock()
        # The weight that a steady rate of one event per second would have by now, so that the rate has no warm-up.
        unit = _RATE_SECONDS * -math.expm1((self._started - now) / _RATE_SECONDS)
        return self._weight * math.exp((self._updated - now) / _RATE_SECONDS) / max(unit, 1e-9)
