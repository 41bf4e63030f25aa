"""The Condition type, and how conditions are merged into the status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.situation import Situation

# Messages that quote other programs are truncated: they are read in a terminal, and the API server rejects longer ones.
MESSAGE_LIMIT: Final = 1000


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition without the type, generation and time that `merge_conditions` adds."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def true(reason: str, message: str) -> Condition:
    """Return a condition that is True."""
    return Condition("True", reason, message)


def false(reason: str, message: str) -> Condition:
    """Return a condition that is False."""
    return Condition("False", reason, message)


def unknown(reason: str, message: str) -> Condition:
    """Return a condition that is Unknown."""
    return Condition("Unknown", reason, message)


def not_observed(situation: Situation) -> Condition:
    """Return the condition for a Deployment that does not exist yet, or whose status is of an earlier spec."""
    if situation.observed.deployment is None and situation.spec.is_preloaded and not situation.is_cached:
        return unknown("WaitingForModel", "the pods are created when the model is downloaded")
    return unknown("NotObserved", "the Deployment controller has not yet observed the latest spec")


def as_before(kind: str, observed: Observed, message: str) -> Condition:
    """Return the condition of type `kind` from the current status, or Unknown with `message` if there is none.

    For conditions that the operator can only compute after observing for a while: a restart must not change them.
    """
    for condition in observed.resource.get("status", {}).get("conditions", ()):
        if condition["type"] == kind:
            return Condition(condition["status"], condition["reason"], condition["message"])
    return unknown("NotObserved", message)


def shortened(message: str, limit: int) -> str:
    """Return a message of at most `limit` characters: its beginning with the field, and its end with the remedy."""
    if len(message) <= limit:
        return message
    end = limit // 4
    return f"{message[: limit - end - 1]}…{message[-end:]}"


def merge_conditions(
    conditions: Mapping[str, Condition], old: Sequence[dict[str, Any]], generation: int, now: str
) -> list[dict[str, Any]]:
    """Return the conditions in API form; the transition time is kept if the status is unchanged.

    Args:
        conditions: by type.
        old: the conditions of the current status.
        now: RFC 3339 time in UTC with whole seconds.
    """
    times = {(each["type"], each["status"]): each["lastTransitionTime"] for each in old}
    return [
        {
            "type": kind,
            "status": condition.status,
            "observedGeneration": generation,
            "reason": condition.reason,
            "message": shortened(condition.message, MESSAGE_LIMIT),
            "lastTransitionTime": times.get((kind, condition.status), now),
        }
        for kind, condition in conditions.items()
    ]
