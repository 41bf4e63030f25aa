"""The condition Ready, the summary of the others, for `kubectl wait`.

Ready is True if the conditions in `table.SUMMARIZED` are. Otherwise its status, reason and message are those of the
first of them that is False, else of the first that is Unknown. While Available is True, these do not count, because
they are only about replicas that the autoscaler added, or about pods that no longer exist: PodsScheduled, and of
Progressing the reasons PodsFailed, ReplicaFailure and ProgressDeadlineExceeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastgen_operator.status.conditions.available import AVAILABLE
from fastgen_operator.status.conditions.condition import Condition
from fastgen_operator.status.conditions.pods_scheduled import PODS_SCHEDULED

READY: Final = "Ready"
_OF_OTHER_PODS: Final = ("PodsFailed", "ReplicaFailure", "ProgressDeadlineExceeded")


def ready(parts: Mapping[str, Condition]) -> Condition:
    """Return, of the parts that count, the first that is False, else the first Unknown, else the last.

    Args:
        parts: the summarized conditions by type, in order of precedence.
    """
    serves = parts[AVAILABLE].status == "True"

    def counts(kind: str, part: Condition) -> bool:
        return not serves or not (kind == PODS_SCHEDULED or part.reason in _OF_OTHER_PODS)

    counted = [part for kind, part in parts.items() if counts(kind, part)]
    return next((part for status in ("False", "Unknown") for part in counted if part.status == status), counted[-1])
