"""The condition TemplateUnmodified: whether only the operator sets fields of the pods' spec in the Deployment.

Sources: its managedFields, and a comparison with what the operator applied. Absent if only the operator sets them. The
operator removes foreign fields that decide where the pods run or what the engine does, and leaves what admission
rewrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastgen_operator.plan.foreign_fields import foreign_fields
from fastgen_operator.plan.observed import Observed
from fastgen_operator.status.conditions.condition import Condition, false

TEMPLATE_UNMODIFIED: Final = "TemplateUnmodified"
_LISTED: Final = 5


def template_unmodified(observed: Observed, rewritten: Sequence[str]) -> Condition | None:
    """Compute the condition TemplateUnmodified; None if only the operator sets fields.

    Args:
        rewritten: fields of the Deployment that admission changed, removed or added.
    """
    name = observed.key[1]
    found = () if observed.deployment is None else foreign_fields(observed.deployment.obj)
    messages = []
    if found:
        named = _listed([f"{field.name} by {field.manager}" for field in found])
        messages.append(
            f"added to Deployment {name}: {named}: set the fields in spec.podTemplate instead, "
            "and remove them from the Deployment"
        )
    if rewritten:
        messages.append(
            f"a mutating admission webhook or policy changed Deployment {name}: "
            f"{_listed(rewritten)}: to find it, run "
            "kubectl get mutatingwebhookconfigurations and, if the cluster has them, kubectl get "
            f"mutatingadmissionpolicies; without it, kubectl delete deployment {name} --cascade=orphan restores the "
            "fields"
        )
    return false("ForeignFields" if found else "RewrittenByWebhook", "; ".join(messages)) if messages else None


def _listed(fields: Sequence[str]) -> str:
    more = f" and {len(fields) - _LISTED} more" if len(fields) > _LISTED else ""
    return ", ".join(fields[:_LISTED]) + more
