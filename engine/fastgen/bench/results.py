"""Results of a load: throughput and latencies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastgen.bench.workload import Workload

SHARES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Answer:
    """One completed request; times in seconds on one clock.

    Attributes:
        sent: time of sending.
        arrivals: arrival time of each token in process, of each streamed chunk over HTTP.
        prompt_tokens, generated_tokens: number of tokens.
    """

    sent: float
    arrivals: tuple[float, ...]
    prompt_tokens: int
    generated_tokens: int

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive arrivals."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Latency:
    """One kind of latency over all requests, in seconds: mean, percentiles at `SHARES`, and maximum."""

    name: str
    mean: float
    percentiles: tuple[float, ...]
    most: float

    @classmethod
    def of(cls, name: str, values: Sequence[float]) -> Latency | None:
        """Summarize values; None without any."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(name, statistics.fmean(ordered), tuple(percentile(ordered, s) for s in SHARES), ordered[-1])


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a whole run.

    Attributes:
        seconds: time from the first request to the last token.
        failures: error messages of the failed requests.
    """

    seconds: float
    answers: tuple[Answer, ...]
    failures: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        """Total over all completed requests."""
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def generated_tokens(self) -> int:
        """Total over all completed requests."""
        return sum(answer.generated_tokens for answer in self.answers)

    def rate(self, count: float) -> float:
        """Return `count` per second of the run."""
        return count / self.seconds if self.seconds > 0 else 0.0

    def latencies(self) -> list[Latency]:
        """Return time to first token, gaps between arrivals, time per output token, and end-to-end latency."""
        whole = [answer for answer in self.answers if answer.arrivals]
        kinds = {
            "time to first token": [a.arrivals[0] - a.sent for a in whole],
            "inter-token latency": [gap for a in whole for gap in a.gaps],
            "time per output token": [
                (a.arrivals[-1] - a.arrivals[0]) / (a.generated_tokens - 1) for a in whole if a.generated_tokens > 1
            ],
            "end to end": [a.arrivals[-1] - a.sent for a in whole],
        }
        found = (Latency.of(name, values) for name, values in kinds.items())
        return [latency for latency in found if latency is not None]


def as_json(workload: Workload, results: Results) -> dict[str, Any]:
    """Return the results as plain data, latencies in milliseconds."""
    latencies = {
        latency.name.replace(" ", "_").replace("-", "_") + "_ms": {
            "mean": round(latency.mean * 1000, 3),
            **{f"p{share * 100:g}": round(v * 1000, 3) for share, v in zip(SHARES, latency.percentiles, strict=True)},
            "max": round(latency.most * 1000, 3),
        }
        for latency in results.latencies()
    }
    return {
        "workload": asdict(workload),
        "seconds": round(results.seconds, 3),
        "answered": len(results.answers),
        "failed": len(results.failures),
        "prompt_tokens": results.prompt_tokens,
        "generated_tokens": results.generated_tokens,
        "requests_per_second": round(results.rate(len(results.answers)), 3),
        "generated_tokens_per_second": round(results.rate(results.generated_tokens), 1),
        "total_tokens_per_second": round(results.rate(results.prompt_tokens + results.generated_tokens), 1),
        **latencies,
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of ascending values by linear interpolation; `share` is 0 to 1."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
