"""The Condition type, and how conditions are merged into the status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fastgen_operator.api import Spec
from fastgen_operator.children.model_source import is_preloaded
from fastgen_operator.plan.model_cache import complete_job
from fastgen_operator.plan.observed import Observed

# Messages that quote other programs are truncated: conditions are read in a terminal.
_MESSAGE_LIMIT: Final = 1000

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition without the generation and time that `merge` adds."""

    type: str
    status: Truth
    reason: str
    message: str


def not_observed(kind: str, spec: Spec, observed: Observed) -> Condition:
    """Return the condition for a Deployment that was not observed yet.

    It does not exist yet, or its status describes an earlier spec.
    """
    if observed.deployment is None and is_preloaded(spec) and complete_job(spec, observed) is None:
        return Condition(kind, "Unknown", "WaitingForModel", "the pods are created when the model is downloaded")
    return Condition(kind, "Unknown", "NotObserved", "the Deployment controller has not yet observed the latest spec")


def merge(conditions: Sequence[Condition], old: Sequence[dict[str, Any]], generation: int, now: str) -> list[Any]:
    """Return the conditions in API form; the transition time is kept if the status is unchanged.

    Args:
        old: the conditions of the current status.
        now: RFC 3339 time in UTC with whole seconds.
    """
    before = {condition["type"]: condition for condition in old}
    merged = []
    for condition in conditions:
        previous = before.get(condition.type)
        same = previous is not None and previous["status"] == condition.status
        merged.append(
            {
                "type": condition.type,
                "status": condition.status,
                "observedGeneration": generation,
                "reason": condition.reason,
                "message": condition.message[:_MESSAGE_LIMIT],
                "lastTransitionTime": previous["lastTransitionTime"] if same and previous else now,
            }
        )
    return merged


def as_before(kind: str, observed: Observed, message: str) -> Condition:
    """Return the condition from the current status, or Unknown with `message` if there is none.

    For conditions that the operator can only compute after observing for a while: a restart must not change them.
    """
    for condition in observed.resource.get("status", {}).get("conditions", ()):
        if condition["type"] == kind:
            return Condition(kind, condition["status"], condition["reason"], condition["message"])
    return Condition(kind, "Unknown", "NotObserved", message)
