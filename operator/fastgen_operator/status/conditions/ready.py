"""The condition Ready, the summary of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastgen_operator.status.conditions.condition import Condition

READY: Final = "Ready"
"""The summary, for `kubectl wait`. True: all replicas of the current template are ready. Otherwise status, reason and
message are those of the first condition in `table.SUMMARIZED` that is False, else of the first that is Unknown."""


def ready(parts: Sequence[Condition]) -> Condition:
    """Compute the condition Ready from `parts`, in order of precedence; if all are True, the last one is copied."""
    for status in ("False", "Unknown"):
        for part in parts:
            if part.status == status:
                return Condition(READY, part.status, part.reason, part.message)
    last = parts[-1]
    return Condition(READY, "True", last.reason, last.message)
