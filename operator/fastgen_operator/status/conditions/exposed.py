"""The condition Exposed: whether the gateway routes requests for the model's name to this resource.

Sources: the other FastGenDeployments, and whether the operator has a gateway. It is omitted unless
spec.gateway.expose is true.
"""

from __future__ import annotations

from typing import Final

from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.conditions.condition import Condition, false, true

EXPOSED: Final = "Exposed"


def exposed(situation: Situation) -> Condition | None:
    """Compute the condition Exposed; None if the spec does not ask for it."""
    spec, observed = situation.spec, situation.observed
    if not spec.gateway.expose:
        return None
    if not situation.has_gateway:
        words = "the operator has no gateway: install its chart with gateway.enabled"
        if spec.autoscaling is not None and spec.autoscaling.min_replicas == 0:
            words += "; until then, one replica runs, because nothing would hold requests"
        if situation.num_pickers is not None:
            words += "; until then, there is no InferencePool, because the gateway's picker would serve it"
        return false("NoGateway", words)
    namespace, name = observed.key
    model = spec.model.served_name or name
    if (holder := observed.name_holder) not in (None, observed.key):
        other = "/".join(holder)
        return false(
            "ModelNameTaken",
            f"requests for model {model} go to the older FastGenDeployment {other}: set another spec.model.servedName, "
            f"or ask for model {namespace}/{name}",
        )
    words = f"the gateway routes requests for model {model}"
    if situation.num_pickers is not None:
        serving = "its picker serves" if situation.num_pickers else "none of its pods is ready to serve"
        words += f"; {serving} the InferencePool {name}"
    return true("ModelRouted", words)
