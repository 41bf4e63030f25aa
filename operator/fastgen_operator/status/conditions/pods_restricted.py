"""PodsRestricted."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.children.pod_security import broken_rules
from fastgen_operator.plan.observed import Observed
from fastgen_operator.status.conditions.condition import Condition, not_observed

PODS_RESTRICTED: Final = "PodsRestricted"
"""Whether the pods keep to the restricted Pod Security standard, as they do unless spec.podTemplate changes it: without
a podTemplate the condition is absent. From the Deployment's template. The pods are made all the same; a namespace that
enforces the standard refuses them, which Progressing then says. True: Restricted. False: PodTemplateNotRestricted (each
rule that is broken, and where). Unknown: NotObserved (there is no Deployment yet)."""


def pods_restricted(spec: Spec, observed: Observed) -> Condition | None:
    """See `PODS_RESTRICTED`."""
    if spec.pod_template is None:
        return None
    if observed.deployment is None:
        return not_observed(PODS_RESTRICTED)
    broken = broken_rules(observed.deployment["spec"]["template"])
    if not broken:
        return Condition(PODS_RESTRICTED, "True", "Restricted", "spec.podTemplate leaves the pods restricted")
    message = f"with spec.podTemplate the pods break the restricted Pod Security standard: {'; '.join(broken)}"
    return Condition(PODS_RESTRICTED, "False", "PodTemplateNotRestricted", message)
