"""Ready, the summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastgen_operator.status.conditions.condition import Condition

READY: Final = "Ready"
"""The summary, for `kubectl wait`. True: every replica of the current template answers. Otherwise its status, reason
and message are those of the first False, else the first Unknown, of the conditions that `table.SUMMED` lists."""


def ready(parts: Sequence[Condition]) -> Condition:
    """See `READY`; `parts` in the order in which they are looked at, the one that says "True" best last."""
    for status in ("False", "Unknown"):
        for part in parts:
            if part.status == status:
                return Condition(READY, part.status, part.reason, part.message)
    last = parts[-1]
    return Condition(READY, "True", last.reason, last.message)
