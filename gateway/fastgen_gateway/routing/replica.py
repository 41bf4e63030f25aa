"""The load of one replica: its last metrics, and what this picker has sent since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastgen_operator.autoscale.sample import Sample, StepCoefficients

# Metrics older than this are not used. They are scraped twice a second.
STALE_SECONDS: Final = 5.0
# Output tokens over which the gaps of a request and of those beside it count.
_GAPS: Final = 32
# Requests behind a prompt that count at most: otherwise a prefix that is popular would never be computed elsewhere.
_MOST_BEHIND: Final = 3.0
# Held requests that a replica without metrics gets at a time.
_BLIND_REQUESTS: Final = 8
# Held requests are sent to a replica until its backlog takes this long.
_BACKLOG_SECONDS: Final = 0.5
# After a request that it did not answer, a replica gets none for this long; after each further one, twice as long.
_FIRST_EJECTION: Final = 1.0
_LONGEST_EJECTION: Final = 30.0


@dataclass(slots=True, eq=False)
class Sent:
    """A request that was sent to a replica and has not ended.

    Attributes:
        time: when it was sent.
        tokens: tokens of its prompt.
        uncached: those of them that the replica has to compute.
    """

    time: float
    tokens: int
    uncached: int


class Replica:
    """A replica, as the picker knows it. Its backlog is a fluid: prompt tokens arrive, and the steps compute them.

    Attributes:
        address: IP address and port.
        pod: name of its pod; empty if it is unknown.
        sent: requests that were sent to it and have not ended.
    """

    __slots__ = (
        "_backlog",
        "_backlog_time",
        "_ejected_until",
        "_kv_tokens",
        "_num_failures",
        "_others",
        "_sample",
        "address",
        "pod",
        "sent",
    )

    def __init__(self, address: str, pod: str = "") -> None:
        self.address, self.pod = address, pod
        self.sent: set[Sent] = set()
        self._sample: Sample | None = None
        self._others = 0.0
        self._backlog, self._backlog_time, self._kv_tokens = 0.0, 0.0, 0.0
        self._num_failures, self._ejected_until = 0, 0.0

    def add(self, sent: Sent) -> None:
        """Count a request that is sent now."""
        self._backlog = self._backlog_at(sent.time) + sent.uncached
        self._backlog_time = sent.time
        self._kv_tokens += sent.tokens
        self.sent.add(sent)

    def remove(self, sent: Sent) -> None:
        """Count the end of a request. It may have been counted before."""
        self.sent.discard(sent)

    def succeed(self) -> None:
        """Count a request that it answers."""
        self._num_failures = 0

    def fail(self, now: float) -> None:
        """Count a request that it did not answer: it gets none for a while. Requests that fail at once count as one."""
        if not self.is_ejected(now):
            self._ejected_until = now + min(_LONGEST_EJECTION, _FIRST_EJECTION * 2**self._num_failures)
            self._num_failures += 1

    def is_ejected(self, now: float) -> bool:
        """Return whether it should get no request for now, because it did not answer one."""
        return now < self._ejected_until

    def observe(self, sample: Sample, began: float) -> None:
        """Take a scrape that began at `began`. Requests that were sent later may be missing in it.

        The engine's backlog has whole prompts of its queue, even if they are in its prefix cache. So it is at most what
        this picker expects to be computed, unless the replica has requests of others.
        """
        later = [sent for sent in self.sent if sent.time >= began]
        earlier = self.sent.difference(later)
        self._sample = sample
        self._others = max(0.0, sample.running + sample.waiting - len(earlier))
        backlog = sample.backlog_tokens
        if earlier and self._others < 1:
            backlog = min(backlog, sum(sent.uncached for sent in earlier))
        self._backlog = backlog + sum(sent.uncached for sent in later)
        self._backlog_time = sample.time
        self._kv_tokens = sample.kv_tokens + sum(sent.tokens for sent in later)

    def sample(self, now: float) -> Sample | None:
        """Return the last metrics unless they are stale."""
        sample = self._sample
        return sample if sample is not None and now - sample.time <= STALE_SECONDS else None

    def step_model(self, now: float) -> StepCoefficients | None:
        """Return the replica's step model; None while it is unknown."""
        sample = self.sample(now)
        return sample.step_model if sample is not None and any(sample.step_model) else None

    def num_requests(self, now: float) -> float:
        """Return the requests that it has: of this picker, and by its metrics of others."""
        return len(self.sent) + (self._others if self.sample(now) is not None else 0.0)

    def cost(self, tokens: int, cached: int, now: float, model: StepCoefficients, budget: float, rate: float) -> float:
        """Return the seconds of waiting that a prompt of `tokens`, of which `cached` are in its prefix cache, causes.

        They are the time to its first token, the time that requests behind it wait longer for theirs, and the gaps
        between the first output tokens: its own ones, and what it adds to those of the other requests.

        Args:
            tokens: tokens of the prompt.
            cached: those in the replica's prefix cache.
            now: the time.
            model: step model of the replica, or of its fleet while its own one is unknown.
            budget: maximum tokens of a step.
            rate: requests that arrive in a second for each replica.
        """
        requests, kv_tokens = self.num_requests(now), self._kv_tokens_at(now)
        uncached = max(1, tokens - cached)
        work = self._backlog_at(now) + uncached
        room = max(1.0, budget - requests)  # for prompt tokens in a full step
        if work <= room:
            first = model.base + model.token * (requests + work) + model.kv_token * (kv_tokens + work)
        else:
            first = work / room * (model.base + model.token * (requests + room) + model.kv_token * (kv_tokens + work))
        pairs = model.context_pair * uncached * (cached + uncached / 2)
        own = uncached / work * first + pairs
        first += pairs
        # Requests that come while the others are computed wait for all of it, later ones for what is left of it.
        behind = min(_MOST_BEHIND, rate * (first - own / 2)) * own
        more = model.token + model.kv_token * tokens
        gap = model.base + model.token * requests + model.kv_token * kv_tokens + more
        sample = self.sample(now)
        missing = kv_tokens + tokens - sample.kv_capacity_tokens if sample is not None else 0.0
        if missing > 0:  # until the others have freed as many: they free at least what they decode
            first += missing / max(1.0, requests) * gap
        return first + behind + _GAPS * (gap + requests * more)

    def has_room(self, tokens: int, now: float) -> bool:
        """Return whether a held request should be sent to it now. An idle replica always has room."""
        requests = self.num_requests(now)
        if requests < 1:
            return True
        sample = self.sample(now)
        if sample is None:
            return requests < _BLIND_REQUESTS
        if requests >= sample.token_budget:
            return False
        # The engine rejects a longer prompt. It must not wait until the replica is idle, with all others behind it.
        if self._kv_tokens + tokens > sample.kv_capacity_tokens >= tokens:
            return False
        model = self.step_model(now)
        if model is None:
            return requests < _BLIND_REQUESTS
        return self._backlog_at(now) <= _BACKLOG_SECONDS * self._tokens_per_second(sample)

    def _backlog_at(self, now: float) -> float:
        sample = self.sample(now)
        if sample is None:
            return sum(sent.uncached for sent in self.sent)
        passed = max(0.0, now - self._backlog_time)
        return max(0.0, self._backlog - passed * self._tokens_per_second(sample))

    def _kv_tokens_at(self, now: float) -> float:
        return self._kv_tokens if self.sample(now) is not None else sum(sent.tokens for sent in self.sent)

    def _tokens_per_second(self, sample: Sample) -> float:
        """Return the prompt tokens that full steps compute in a second; 0 while the step model is unknown."""
        model = sample.step_model
        seconds = model.base + model.token * sample.token_budget + model.kv_token * self._kv_tokens
        room = max(1.0, sample.token_budget - len(self.sent) - self._others)
        return room / seconds if seconds > 0 else 0.0
