"""The condition TemplateUnmodified."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.plan.foreign import foreign_fields
from fastgen_operator.plan.observed import Observed
from fastgen_operator.status.conditions.condition import Condition

TEMPLATE_UNMODIFIED: Final = "TemplateUnmodified"
"""Whether only the operator sets fields of the pods' spec in the Deployment. Source: its managedFields. Absent unless
another manager has added fields. False: ForeignFields (lists the fields with their managers). The operator removes
fields that decide where the pods run or what the engine does, and keeps the others."""

_LISTED: Final = 5


def template_unmodified(spec: Spec, observed: Observed) -> Condition | None:
    """Compute the condition TemplateUnmodified."""
    del spec
    found = () if observed.deployment is None else foreign_fields(observed.deployment)
    if not found:
        return None
    named = [f"{field.name} by {field.manager}" for field in found[:_LISTED]]
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    message = (
        f"added to Deployment {observed.key[1]}: {', '.join(named)}{more}: set the fields in spec.podTemplate instead, "
        "and remove them from the Deployment"
    )
    return Condition(TEMPLATE_UNMODIFIED, "False", "ForeignFields", message)
