"""The requests that are under way in the engine process, as the server knows them.

The server is the engine's only client, so what it has sent and what the engine has reported is all there is to know.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable

from fastgen.engine.messages import StepReport, TokenOutput

# Over which the rate of ended requests is taken: long enough for slow generations, short enough to follow the load.
_RATE_SECONDS = 30.0

Outputs = asyncio.Queue[TokenOutput | None]


class InFlight:
    """Streams of outputs by request id, and how many requests wait for a place among the running ones.

    A request is promised when it is let in, open from when it is sent to the engine until its end is known, then gone.
    """

    def __init__(self, max_sequences: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_sequences = max_sequences
        self._places = max_sequences
        self._streams: dict[str, Outputs] = {}
        self._promised: set[str] = set()
        self._ended = Rate(clock)

    @property
    def num_queued(self) -> int:
        """Requests that have no place in the engine: those that it reported as waiting, those sent or promised since.

        The engine has `max_sequences` places as long as nobody waits for one. Where somebody does, memory or the token
        budget holds it to fewer: to as many as its last pass had.
        """
        return max(0, len(self._streams) + len(self._promised) - self._places)

    @property
    def ended_per_second(self) -> float:
        """Requests that have lately left the engine, per second."""
        return self._ended.per_second()

    def promise(self, request_ids: Iterable[str]) -> None:
        """Counts requests that are let in but not yet sent."""
        self._promised.update(request_ids)

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Takes promises back, of requests that will not be sent."""
        self._promised.difference_update(request_ids)

    def open(self, request_id: str) -> Outputs:
        """Where the outputs of a request that is now sent will come; None among them means that the engine died."""
        assert request_id not in self._streams, f"request id {request_id} is in use"
        self._promised.discard(request_id)
        outputs = self._streams[request_id] = asyncio.Queue()
        return outputs

    def close(self, request_id: str) -> bool:
        """Forgets a request. False if its end had already come."""
        if self._streams.pop(request_id, None) is None:
            return False
        self._ended.note(1)
        return True

    def ids(self) -> list[str]:
        """The requests that are open."""
        return list(self._streams)

    def take(self, report: StepReport) -> None:
        """Takes in one report of the engine."""
        num_ended = 0
        for output in report.outputs:
            num_ended += output.finish_reason is not None
            self.give(output)
        stats = report.scheduler
        is_short = stats.num_waiting or stats.num_swapped
        self._places = stats.num_running + num_ended if is_short else self._max_sequences

    def give(self, output: TokenOutput) -> None:
        """Hands an output to whoever reads the request's stream, if anybody still does."""
        outputs = self._streams.get(output.request_id)
        if outputs is None:
            return
        if output.finish_reason is not None:
            self.close(output.request_id)
        outputs.put_nowait(output)

    def end_all(self) -> None:
        """Tells the readers of all streams that nothing more comes."""
        streams, self._streams = self._streams, {}
        for outputs in streams.values():
            outputs.put_nowait(None)


class Rate:
    """Events per second, of which the recent ones count more: their weight falls by e in `_RATE_SECONDS`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._at = clock()
        self._weight = 0.0

    def note(self, count: int) -> None:
        """Something happened `count` times."""
        now = self._clock()
        self._weight = self._weight * math.exp((self._at - now) / _RATE_SECONDS) + count
        self._at = now

    def per_second(self) -> float:
        """The rate now; 0 where nothing has happened."""
        now = self._clock()
        # What a steady rate of one event per second would weigh by now: right from the first second on.
        full = _RATE_SECONDS * -math.expm1((self._began - now) / _RATE_SECONDS)
        return self._weight * math.exp((self._at - now) / _RATE_SECONDS) / max(full, 1e-9)
