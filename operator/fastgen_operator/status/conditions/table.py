"""All conditions in order: those that Ready summarizes, and the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fastgen_operator.plan.plan import Problem
from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.conditions.available import AVAILABLE, available
from fastgen_operator.status.conditions.condition import Condition, false, unknown
from fastgen_operator.status.conditions.exposed import EXPOSED, exposed
from fastgen_operator.status.conditions.headroom_reserved import HEADROOM_RESERVED, headroom_reserved
from fastgen_operator.status.conditions.model_cached import MODEL_CACHED, model_cached
from fastgen_operator.status.conditions.pods_restricted import PODS_RESTRICTED, pods_restricted
from fastgen_operator.status.conditions.pods_scheduled import PODS_SCHEDULED, pods_scheduled
from fastgen_operator.status.conditions.progressing import PROGRESSING, progressing
from fastgen_operator.status.conditions.ready import READY, ready
from fastgen_operator.status.conditions.replicas_uniform import REPLICAS_UNIFORM, replicas_uniform
from fastgen_operator.status.conditions.scaling_active import SCALING_ACTIVE, scaling_active
from fastgen_operator.status.conditions.scaling_limited import SCALING_LIMITED, scaling_limited
from fastgen_operator.status.conditions.template_unmodified import TEMPLATE_UNMODIFIED, template_unmodified

_Table = Mapping[str, Callable[[Situation], Condition]]

# Conditions that Ready summarizes, causes before their effects: Ready copies the first that is False, else Unknown.
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
# Conditions that Ready ignores, too. The module of each says when it is omitted from the status.
OPTIONAL: Final = (EXPOSED, HEADROOM_RESERVED, PODS_RESTRICTED, TEMPLATE_UNMODIFIED)
ORDER: Final = (*SUMMARIZED, *INDEPENDENT, *OPTIONAL)


def all_conditions(
    situation: Situation, problem: Problem | None, rewritten: Sequence[str] = ()
) -> dict[str, Condition]:
    """Return the conditions by type, Ready first, without the optional ones that are omitted.

    Args:
        problem: what prevents the operator's own writes.
        rewritten: fields of the Deployment that admission changes in every write.
    """
    optional = {
        EXPOSED: exposed(situation),
        HEADROOM_RESERVED: headroom_reserved(situation),
        PODS_RESTRICTED: pods_restricted(situation),
        TEMPLATE_UNMODIFIED: template_unmodified(situation.observed, rewritten),
    }
    return {
        **_summarized({kind: compute(situation) for kind, compute in SUMMARIZED.items()}, problem),
        **{kind: compute(situation) for kind, compute in INDEPENDENT.items()},
        **{kind: condition for kind, condition in optional.items() if condition is not None},
    }


def unread_conditions(problem: Problem) -> dict[str, Condition]:
    """Return the conditions of a resource whose spec cannot be read, or whose status cannot be computed.

    Progressing shows the problem.
    """
    unread = unknown("NotObserved", "not computed, because of the problem in the condition Progressing")
    return {**_summarized(dict.fromkeys(SUMMARIZED, unread), problem), **dict.fromkeys(INDEPENDENT, unread)}


def _summarized(parts: dict[str, Condition], problem: Problem | None) -> dict[str, Condition]:
    if problem is not None:
        parts[PROGRESSING] = false(problem.reason, problem.message)
    return {READY: ready(parts), **parts}
