"""Requests that wait for a ready replica."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from fastgen_gateway.routing.client import Client
from fastgen_gateway.routing.refusal import Refusal, hold_full
from fastgen_gateway.routing.request_body import RequestBody
from fastgen_operator.kinds import Key


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Limits of held requests, of all models together.

    Attributes:
        seconds: how long a request may wait.
        requests: how many requests may wait.
        bytes: how large their bodies may be together.
    """

    seconds: float = 900.0
    requests: int = 5000
    bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A request that has waited since `time`. `client` is None if the gateway asks for no keys."""

    key: Key
    body: RequestBody
    time: float
    client: Client | None = None

    @property
    def priority(self) -> int:
        """The client's priority; requests with a lower one are released first."""
        return 0 if self.client is None else self.client.priority


@dataclass(slots=True)
class HeldTotals:
    """Number of held requests, and the prompt tokens and bytes that they have."""

    requests: int = 0
    tokens: int = 0
    bytes: int = 0

    def count(self, held: Held, sign: int) -> None:
        """Add a request, or remove it with a sign of -1."""
        self.requests += sign
        self.tokens += sign * held.body.prompt_tokens
        self.bytes += sign * held.body.num_bytes


@dataclass(slots=True)
class _Waiting:
    """The held requests of one model: by priority and then in order of arrival. None of the queues is empty."""

    queues: dict[int, OrderedDict[Held, None]] = field(default_factory=dict)
    totals: HeldTotals = field(default_factory=HeldTotals)

    @property
    def first(self) -> Held:
        """The one that is released next."""
        return next(iter(self.queues[min(self.queues)]))

    @property
    def last(self) -> Held:
        """The one that is released last."""
        return next(reversed(self.queues[max(self.queues)]))

    @property
    def oldest(self) -> float:
        """Since when the oldest one waits."""
        return min(next(iter(queue)).time for queue in self.queues.values())


class HeldRequests:
    """The held requests of all models.

    At the limits, a request displaces the newest ones of the model that holds most, unless its own model would then
    hold more than that one. So the requests of one model cannot crowd out those of another.

    Attributes:
        total: of all models.
        displaced: requests that were displaced and have no answer yet; the owner clears it.
    """

    def __init__(self, limits: HoldLimits) -> None:
        self._limits = limits
        self._models: dict[Key, _Waiting] = {}
        self.total = HeldTotals()
        self.displaced: list[Held] = []

    def add(self, held: Held) -> Refusal | None:
        """Hold a request, or return the error for one beyond the limits."""
        if (full := self._full(held)) and not self._make_room(held):
            return hold_full(full)
        waiting = self._models.setdefault(held.key, _Waiting())
        waiting.queues.setdefault(held.priority, OrderedDict())[held] = None
        self._count(waiting, held, 1)
        return None

    def remove(self, held: Held) -> bool:
        """Remove a request; return whether it was held."""
        waiting = self._models.get(held.key)
        queue = None if waiting is None else waiting.queues.get(held.priority)
        if waiting is None or queue is None or held not in queue:
            return False
        del queue[held]
        if not queue:
            del waiting.queues[held.priority]
        if not waiting.queues:
            del self._models[held.key]
        self._count(waiting, held, -1)
        return True

    def first(self, key: Key) -> Held | None:
        """Return the request of a model that is released next."""
        waiting = self._models.get(key)
        return None if waiting is None else waiting.first

    def of(self, key: Key) -> HeldTotals:
        """Return the totals of a model."""
        waiting = self._models.get(key)
        return HeldTotals() if waiting is None else waiting.totals

    def oldest(self, key: Key) -> float | None:
        """Return since when the oldest request of a model waits; None if none does."""
        waiting = self._models.get(key)
        return None if waiting is None else waiting.oldest

    def keys(self) -> tuple[Key, ...]:
        """Return the deployments for which requests wait."""
        return tuple(self._models)

    def removed(self) -> Iterator[Held]:
        """Remove and yield all requests."""
        for key in self.keys():
            while (first := self.first(key)) is not None:
                self.remove(first)
                yield first

    def expired(self, now: float) -> Iterator[Held]:
        """Remove and yield the requests that have waited too long."""
        for waiting in tuple(self._models.values()):
            for queue in tuple(waiting.queues.values()):
                while queue and now - (oldest := next(iter(queue))).time >= self._limits.seconds:
                    self.remove(oldest)
                    yield oldest

    def _full(self, held: Held) -> str:
        """Return which limit a further request would exceed, in words; empty if none."""
        if self.total.bytes + held.body.num_bytes > self._limits.bytes:
            return f"bodies of {self.total.bytes >> 20} MiB, and at most {self._limits.bytes >> 20} MiB"
        return f"{self.total.requests} requests, its limit" if self.total.requests >= self._limits.requests else ""

    def _make_room(self, held: Held) -> bool:
        """Displace requests of the model that holds most; return whether there is room now."""
        if not self._models:
            return False
        counts_bytes = self.total.bytes + held.body.num_bytes > self._limits.bytes

        def amount(totals: HeldTotals) -> int:
            return totals.bytes if counts_bytes else totals.requests

        more = held.body.num_bytes if counts_bytes else 1
        largest = max(self._models.values(), key=lambda each: amount(each.totals))
        if amount(self.of(held.key)) + more > amount(largest.totals) - more:
            return False
        while self._full(held):
            last = largest.last
            self.remove(last)
            self.displaced.append(last)
        return True

    def _count(self, waiting: _Waiting, held: Held, sign: int) -> None:
        waiting.totals.count(held, sign)
        self.total.count(held, sign)
