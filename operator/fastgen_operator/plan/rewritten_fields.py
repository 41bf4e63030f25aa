"""Fields of the Deployment that a mutating admission webhook or policy changed, removed or added. Pure.

The API server computes `metadata.managedFields` before admission: a field of the operator's manifest stays the
operator's there, and an added field has no owner. So values are compared, and the fields that may be added are listed:
all others can be defaults of the API server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastgen_operator.children.strategic_merge import MERGE_KEYS
from fastgen_operator.kinds import Object
from fastgen_operator.plan.foreign_fields import foreign_fields
from fastgen_operator.quantities import quantity

# Fields of a pod and of a container that the API server never sets by itself.
_NOT_DEFAULTED: Final = frozenset(
    (
        *("affinity", "dnsConfig", "hostAliases", "hostIPC", "hostNetwork", "hostPID", "imagePullSecrets", "nodeName"),
        *("initContainers", "nodeSelector", "priorityClassName", "runtimeClassName", "schedulingGates", "tolerations"),
        *("topologySpreadConstraints", "volumes"),
        *("args", "command", "env", "envFrom", "lifecycle", "limits", "ports", "volumeMounts", "workingDir"),
    )
)
# Maps whose keys are free.
_FREE: Final = ("nodeSelector", "limits")
_TEMPLATE: Final = "spec.template.spec"


def rewritten_fields(manifest: Object, live: Object) -> tuple[str, ...]:
    """Return the names of the fields that admission changed, removed or added.

    Args:
        manifest: the Deployment that the operator applied last.
        live: the Deployment, of which the operator has lost no field to another manager.
    """
    others = tuple(field.name for field in foreign_fields(live))
    found = _differences("spec", manifest["spec"], live["spec"])
    return tuple(sorted(path for path in found if not path.startswith(others)))


def _differences(path: str, wanted: Any, live: Any) -> Iterator[str]:
    """Yield the paths at which two values differ. Of a missing map or list, only its own path is named."""
    left, right = _parts(path, wanted), _parts(path, live)
    if left is None or right is None:
        # The API server stores quantities in another form.
        if wanted != live and (quantity(wanted) is None or quantity(wanted) != quantity(live)):
            yield path
        return
    for name, value in left.items():
        if name in right:
            yield from _differences(path + name, value, right[name])
        elif value:  # the API server drops empty values
            yield path + name
    for name in right.keys() - left.keys():
        is_of_pod = path.startswith(_TEMPLATE) and name[1:] in _NOT_DEFAULTED
        if name.startswith("[") or path.endswith(_FREE) or is_of_pod:
            yield path + name


def _parts(path: str, value: Any) -> dict[str, Any] | None:
    """Return the fields of a map, or the items of a list by their merge keys, as they continue a path; else None."""
    if isinstance(value, dict):
        return {f".{name}": field for name, field in value.items()}
    if not isinstance(value, list):
        return None
    key = MERGE_KEYS.get(path.rpartition(".")[2])
    labels = [str(item.get(key)) for item in value if isinstance(item, dict)] if key else []
    if len({*labels}) < len(value):
        # The list has no merge key, or two of its items have the same one: name the items by index.
        labels = [str(index) for index in range(len(value))]
    return {f"[{label}]": item for label, item in zip(labels, value, strict=True)}
