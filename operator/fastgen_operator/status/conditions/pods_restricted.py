"""The condition PodsRestricted: whether the pods comply with the restricted Pod Security Standard.

Source: the Deployment's template. The generated pods comply, so the condition is absent without spec.podTemplate. With
`podTemplate: any` in the chart's values, violations do not block the rollout; a namespace that enforces the standard
rejects the pods, which Progressing reports. With `podTemplate: restricted`, only a template from before can violate it.
"""

from __future__ import annotations

from typing import Final

from fastgen_operator.children.pod_security import broken_rules
from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.conditions.condition import Condition, false, not_observed, true

PODS_RESTRICTED: Final = "PodsRestricted"


def pods_restricted(situation: Situation) -> Condition | None:
    """Compute the condition PodsRestricted; None without spec.podTemplate."""
    deployment = situation.observed.deployment
    if situation.spec.pod_template is None:
        return None
    if deployment is None:
        return not_observed(situation)
    if broken := broken_rules(deployment.template):
        message = f"spec.podTemplate violates the restricted Pod Security Standard: {'; '.join(broken)}"
        return false("PodTemplateNotRestricted", message)
    return true("Restricted", "the pods comply with the restricted Pod Security Standard")
