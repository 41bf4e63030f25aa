"""The conditions of a FastGenDeployment: this package is their only writer. Pure.

One module each, which documents who sets the condition, when, and its reasons; `table` says their order, `ready` sums
them up. Each is set from the first visit, Unknown if need be, with the generation of the spec that it is about.
"""

from fastgen_operator.status.conditions.available import AVAILABLE
from fastgen_operator.status.conditions.condition import Condition, merge
from fastgen_operator.status.conditions.model_cached import MODEL_CACHED
from fastgen_operator.status.conditions.pods_restricted import PODS_RESTRICTED
from fastgen_operator.status.conditions.pods_scheduled import PODS_SCHEDULED
from fastgen_operator.status.conditions.progressing import PROGRESSING
from fastgen_operator.status.conditions.ready import READY
from fastgen_operator.status.conditions.scaling_active import SCALING_ACTIVE
from fastgen_operator.status.conditions.scaling_limited import SCALING_LIMITED
from fastgen_operator.status.conditions.table import ORDER, all_conditions

__all__ = [
    "AVAILABLE",
    "MODEL_CACHED",
    "ORDER",
    "PODS_RESTRICTED",
    "PODS_SCHEDULED",
    "PROGRESSING",
    "READY",
    "SCALING_ACTIVE",
    "SCALING_LIMITED",
    "Condition",
    "all_conditions",
    "merge",
]
