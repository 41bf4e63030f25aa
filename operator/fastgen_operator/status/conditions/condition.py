"""One condition, and how the status keeps it from visit to visit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed

# Longer words of others are cut: a condition is read in a terminal.
_MESSAGE_LIMIT: Final = 1000

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, without the times that `merge` adds."""

    type: str
    status: Truth
    reason: str
    message: str


# None where the spec asks for nothing that the condition could be about: it is then left out of the status.
Judge = Callable[[Spec, Observed], Condition | None]


def not_observed(kind: str) -> Condition:
    """That condition while the Deployment's status is about an earlier spec."""
    return Condition(kind, "Unknown", "NotObserved", "the Deployment controller has not yet seen the newest spec")


def merge(conditions: Sequence[Condition], old: Sequence[dict[str, Any]], generation: int, now: str) -> list[Any]:
    """The conditions as the status holds them; the transition time is kept where the status did not change.

    `now` is an RFC 3339 time in UTC with whole seconds.
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
    """That condition as the status has it, while nothing newer is known; Unknown, with that message, where it has none.

    For what the operator has to watch for a while before it knows: a restart of the operator changes nothing.
    """
    for condition in observed.resource.get("status", {}).get("conditions", ()):
        if condition["type"] == kind:
            return Condition(kind, condition["status"], condition["reason"], condition["message"])
    return Condition(kind, "Unknown", "NotObserved", message)
