"""The condition Ready, the summary of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastgen_operator.status.conditions.available import AVAILABLE
from fastgen_operator.status.conditions.condition import Condition
from fastgen_operator.status.conditions.pods_scheduled import PODS_SCHEDULED

READY: Final = "Ready"
"""The summary, for `kubectl wait`. True: what was promised serves, that is all current replicas or, with
autoscaling, minReplicas. Otherwise status, reason and message are those of the first condition in `table.SUMMARIZED`
that is False, else of the first that is Unknown. PodsScheduled does not count while Available is True: then only
replicas wait for a node that the autoscaler added."""


def ready(parts: Sequence[Condition]) -> Condition:
    """Compute the condition Ready from `parts`, in order of precedence.

    If all are True, the last one is copied.
    """
    serves = any(part.type == AVAILABLE and part.status == "True" for part in parts)
    parts = [part for part in parts if not (serves and part.type == PODS_SCHEDULED)]
    for status in ("False", "Unknown"):
        for part in parts:
            if part.status == status:
                return Condition(READY, part.status, part.reason, part.message)
    last = parts[-1]
    return Condition(READY, "True", last.reason, last.message)
