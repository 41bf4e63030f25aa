"""All conditions in order: those that Ready summarizes, and the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Problem
from fastgen_operator.status.conditions.available import AVAILABLE, available
from fastgen_operator.status.conditions.condition import Condition
from fastgen_operator.status.conditions.model_cached import MODEL_CACHED, model_cached
from fastgen_operator.status.conditions.pods_restricted import PODS_RESTRICTED, pods_restricted
from fastgen_operator.status.conditions.pods_scheduled import PODS_SCHEDULED, pods_scheduled
from fastgen_operator.status.conditions.progressing import PROGRESSING, progressing
from fastgen_operator.status.conditions.ready import ready
from fastgen_operator.status.conditions.replicas_uniform import REPLICAS_UNIFORM, replicas_uniform
from fastgen_operator.status.conditions.scaling_active import SCALING_ACTIVE, scaling_active
from fastgen_operator.status.conditions.scaling_limited import SCALING_LIMITED, scaling_limited
from fastgen_operator.status.conditions.template_unmodified import TEMPLATE_UNMODIFIED, template_unmodified

SUMMARIZED: Final[Mapping[str, Callable[[Spec, Observed], Condition]]] = {
    MODEL_CACHED: model_cached,
    PODS_SCHEDULED: pods_scheduled,
    PROGRESSING: progressing,
    AVAILABLE: available,
}
"""Conditions that Ready summarizes, causes before their effects: Ready copies the first that is not True."""

INDEPENDENT: Final[Mapping[str, Callable[[Spec, Observed], Condition]]] = {
    SCALING_ACTIVE: scaling_active,
    SCALING_LIMITED: scaling_limited,
    REPLICAS_UNIFORM: replicas_uniform,
}
"""Conditions that Ready ignores: they can be False while all replicas serve."""

OPTIONAL: Final[Mapping[str, Callable[[Spec, Observed], Condition | None]]] = {
    PODS_RESTRICTED: pods_restricted,
    TEMPLATE_UNMODIFIED: template_unmodified,
}
"""Conditions that Ready ignores, too. One that does not apply to the spec is None, and omitted from the status."""

ORDER: Final = (*SUMMARIZED, *INDEPENDENT, *OPTIONAL)


def all_conditions(spec: Spec | None, observed: Observed, problem: Problem | None) -> tuple[Condition, ...]:
    """Return all conditions, Ready first.

    `spec` is None if it is invalid; `problem` then contains the reason.
    """
    parts = [_summarized(kind, spec, observed, problem) for kind in SUMMARIZED]
    others = [_unreadable(kind) if spec is None else compute(spec, observed) for kind, compute in INDEPENDENT.items()]
    optional = [] if spec is None else [compute(spec, observed) for compute in OPTIONAL.values()]
    return ready(parts), *parts, *others, *(condition for condition in optional if condition is not None)


def _summarized(kind: str, spec: Spec | None, observed: Observed, problem: Problem | None) -> Condition:
    if kind == PROGRESSING and problem is not None:
        return Condition(PROGRESSING, "False", problem.reason, problem.message)
    if spec is None:
        return _unreadable(kind)
    return SUMMARIZED[kind](spec, observed)


def _unreadable(kind: str) -> Condition:
    return Condition(kind, "Unknown", "NotObserved", "the spec could not be read")
