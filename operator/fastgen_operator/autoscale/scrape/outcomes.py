"""Read an engine's counters of requests, errors and latencies from its metrics."""

from __future__ import annotations

from typing import Final

from fastgen_operator.autoscale.scrape.exposition import UnusableError, checked, parse_values
from fastgen_operator.canary.outcomes import Outcomes

_ENDED: Final = "request_success_total"
_REJECTED: Final = "request_rejected_total"
# The field of `Outcomes` that each metric sets.
_SUMS: Final = {
    "time_to_first_token_seconds_count": "first_tokens",
    "time_to_first_token_seconds_sum": "first_token_seconds",
    "inter_token_latency_seconds_count": "gaps",
    "inter_token_latency_seconds_sum": "gap_seconds",
}
# Finish reasons and error codes that are not the client's fault. Draining is not one: the gateway retries elsewhere.
FAILED: Final = frozenset({"out_of_memory", "rejected"})
FAULTS: Final = frozenset(
    {"internal_error", "engine_dead", "engine_late", "loading", "grammars_unavailable", "queue_full"}
)
_NAMES: Final = frozenset(f"fastgen_{name}" for name in (_ENDED, _REJECTED, *_SUMS))
OUTCOMES_QUERY: Final = "&".join(f"name[]={name}" for name in sorted(_NAMES))


def parse_outcomes(text: str, model_name: str, _: float) -> Outcomes:
    """Return the counters of a scrape.

    Raises:
        UnusableError: these are not an engine's metrics, they are incomplete, too large or of another model, or a
            value is impossible.
    """
    values = checked(parse_values(text, model_name, _NAMES))
    sums = {field: values[name, ""] for name, field in _SUMS.items() if (name, "") in values}
    if len(sums) < len(_SUMS):
        raise UnusableError("Incomplete", "the sums of latencies are missing")
    ended = {label: value for (name, label), value in values.items() if name == _ENDED}
    rejected = {label: value for (name, label), value in values.items() if name == _REJECTED}
    failed = sum(ended[label] for label in ended.keys() & FAILED)
    faults = sum(rejected[label] for label in rejected.keys() & FAULTS)
    # Invalid requests say nothing about a revision.
    return Outcomes(requests=sum(ended.values()) + faults, errors=failed + faults, **sums)
