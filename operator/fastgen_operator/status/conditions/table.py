"""All conditions in order: those that Ready summarizes, and the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Problem
from fastgen_operator.status.conditions.available import AVAILABLE, available
from fastgen_operator.status.conditions.condition import Condition, false, unknown
from fastgen_operator.status.conditions.model_cached import MODEL_CACHED, model_cached
from fastgen_operator.status.conditions.pods_restricted import PODS_RESTRICTED, pods_restricted
from fastgen_operator.status.conditions.pods_scheduled import PODS_SCHEDULED, pods_scheduled
from fastgen_operator.status.conditions.progressing import PROGRESSING, progressing
from fastgen_operator.status.conditions.ready import READY, ready
from fastgen_operator.status.conditions.replicas_uniform import REPLICAS_UNIFORM, replicas_uniform
from fastgen_operator.status.conditions.scaling_active import SCALING_ACTIVE, scaling_active
from fastgen_operator.status.conditions.scaling_limited import SCALING_LIMITED, scaling_limited
from fastgen_operator.status.conditions.template_unmodified import TEMPLATE_UNMODIFIED, template_unmodified

_Table = Mapping[str, Callable[[Spec, Observed], Condition]]

# Conditions that Ready summarizes, causes before their effects: Ready copies the first that is not True.
SUMMARIZED: Final[_Table] = {
    MODEL_CACHED: model_cached,
    PODS_SCHEDULED: pods_scheduled,
    PROGRESSING: progressing,
    AVAILABLE: available,
}
# Conditions that Ready ignores: they can be False while all replicas serve.
INDEPENDENT: Final[_Table] = {
    SCALING_ACTIVE: scaling_active,
    SCALING_LIMITED: scaling_limited,
    REPLICAS_UNIFORM: replicas_uniform,
}
# Conditions that Ready ignores, too. One that does not apply to the spec is None, and omitted from the status.
OPTIONAL: Final[Mapping[str, Callable[[Spec, Observed], Condition | None]]] = {
    PODS_RESTRICTED: pods_restricted,
    TEMPLATE_UNMODIFIED: template_unmodified,
}
ORDER: Final = (*SUMMARIZED, *INDEPENDENT, *OPTIONAL)


def all_conditions(spec: Spec | None, observed: Observed, problem: Problem | None) -> dict[str, Condition]:
    """Return all conditions by type, Ready first.

    Args:
        spec: None if it is invalid; `problem` then contains the reason.
        problem: what prevents the operator's own writes.
    """
    unread = unknown("NotObserved", "the spec could not be read")

    def computed(table: _Table) -> dict[str, Condition]:
        return {kind: unread if spec is None else compute(spec, observed) for kind, compute in table.items()}

    parts = computed(SUMMARIZED)
    if problem is not None:
        parts[PROGRESSING] = false(problem.reason, problem.message)
    optional = {} if spec is None else {kind: compute(spec, observed) for kind, compute in OPTIONAL.items()}
    applicable = {kind: condition for kind, condition in optional.items() if condition is not None}
    return {READY: ready(parts), **parts, **computed(INDEPENDENT), **applicable}
