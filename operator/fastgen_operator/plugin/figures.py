"""What engines did between two scrapes. Pure.

Load and latency of one engine, or of all engines of a FastGenDeployment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastgen.api_client.metrics import Interval, Scrape


@dataclass(frozen=True, slots=True)
class Figures:
    """What one engine, or all together, did in an interval.

    Attributes:
        prompt_tokens, decode_tokens: forward tokens per second.
        step: mean share of the token budget that a step used.
        running, waiting: requests.
        backlog_tokens: prompt tokens not yet computed.
        kv_cache: used share of the KV cache.
        first_token, inter_token: median and 99th percentile in seconds; None without any.
    """

    prompt_tokens: float
    decode_tokens: float
    step: float
    running: float
    waiting: float
    backlog_tokens: float
    kv_cache: float
    first_token: tuple[float | None, float | None]
    inter_token: tuple[float | None, float | None]


def figures_of(intervals: Sequence[Interval]) -> Figures:
    """Return the figures of engines together; at least one."""
    whole = Interval.sum_of(intervals)
    room = sum(each.growth("step_tokens_count") * each.after.value("token_budget") for each in intervals)
    capacity = whole.after.value("kv_cache_capacity_tokens")
    return Figures(
        prompt_tokens=whole.rate("scheduled_tokens_total", "prefill"),
        decode_tokens=whole.rate("scheduled_tokens_total", "decode"),
        step=whole.growth("step_tokens_sum") / room if room else 0.0,
        running=whole.after.value("num_requests_running"),
        waiting=whole.after.value("num_requests_waiting"),
        backlog_tokens=whole.after.value("backlog_prompt_tokens"),
        kv_cache=whole.after.value("kv_cache_tokens") / capacity if capacity else 0.0,
        first_token=_percentiles(whole, "time_to_first_token_seconds"),
        inter_token=_percentiles(whole, "inter_token_latency_seconds"),
    )


def _percentiles(interval: Interval, histogram: str) -> tuple[float | None, float | None]:
    median, high = (interval.quantile(histogram, share) for share in (0.5, 0.99))
    return (None if math.isnan(median) else median, None if math.isnan(high) else high)


def load_between(
    before: Mapping[str, Scrape | Exception], after: Mapping[str, Scrape | Exception]
) -> tuple[dict[str, Figures | str], Figures | None]:
    """Return the figures of each pod, or why there are none, and those of all together, if there are any.

    Args:
        before, after: scrapes by pod, or what failed. A new pod has figures from its second scrape on.
    """
    intervals = {
        name: Interval(old, new)
        for name, new in after.items()
        if isinstance(new, Scrape) and isinstance(old := before.get(name), Scrape)
    }
    found: dict[str, Figures | str] = {
        name: figures_of([intervals[name]]) if name in intervals else "" if isinstance(new, Scrape) else str(new)
        for name, new in after.items()
    }
    return found, figures_of(list(intervals.values())) if intervals else None


def milliseconds(seconds: float | None) -> str:
    """Return a time as a number of milliseconds, or a dash."""
    return "-" if seconds is None else f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"
