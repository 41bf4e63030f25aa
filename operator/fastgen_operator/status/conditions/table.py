"""All conditions in order: those that Ready summarizes, and the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Problem
from fastgen_operator.status.conditions.available import AVAILABLE, available
from fastgen_operator.status.conditions.condition import ComputeCondition, Condition
from fastgen_operator.status.conditions.model_cached import MODEL_CACHED, model_cached
from fastgen_operator.status.conditions.pods_restricted import PODS_RESTRICTED, pods_restricted
from fastgen_operator.status.conditions.pods_scheduled import PODS_SCHEDULED, pods_scheduled
from fastgen_operator.status.conditions.progressing import PROGRESSING, progressing
from fastgen_operator.status.conditions.ready import ready
from fastgen_operator.status.conditions.scaling_active import SCALING_ACTIVE, scaling_active
from fastgen_operator.status.conditions.scaling_limited import SCALING_LIMITED, scaling_limited


@dataclass(frozen=True, slots=True)
class Row:
    """A condition type and the function that computes it."""

    type: str
    compute: ComputeCondition


SUMMARIZED: Final = (
    Row(MODEL_CACHED, model_cached),
    Row(PODS_SCHEDULED, pods_scheduled),
    Row(PROGRESSING, progressing),
    Row(AVAILABLE, available),
)
"""Conditions that Ready summarizes, causes before their effects: Ready copies the first that is not True."""

INDEPENDENT: Final = (
    Row(PODS_RESTRICTED, pods_restricted),
    Row(SCALING_ACTIVE, scaling_active),
    Row(SCALING_LIMITED, scaling_limited),
)
"""Conditions that Ready ignores: they can be False while all replicas serve."""

ORDER: Final = tuple(row.type for row in (*SUMMARIZED, *INDEPENDENT))


def all_conditions(spec: Spec | None, observed: Observed, problem: Problem | None) -> tuple[Condition, ...]:
    """Return all conditions, Ready first. `spec` is None if it is invalid; `problem` then contains the reason."""
    parts = _computed(SUMMARIZED, spec, observed, problem)
    return ready(parts), *parts, *_computed(INDEPENDENT, spec, observed, problem)


def _computed(
    rows: tuple[Row, ...], spec: Spec | None, observed: Observed, problem: Problem | None
) -> tuple[Condition, ...]:
    computed = (_compute(row, spec, observed, problem) for row in rows)
    return tuple(condition for condition in computed if condition is not None)


def _compute(row: Row, spec: Spec | None, observed: Observed, problem: Problem | None) -> Condition | None:
    if row.type == PROGRESSING and problem is not None:
        return Condition(PROGRESSING, "False", problem.reason, problem.message)
    if spec is None and row in INDEPENDENT:
        return None
    if spec is None:
        return Condition(row.type, "Unknown", "NotObserved", "the spec could not be read")
    return row.compute(spec, observed)
