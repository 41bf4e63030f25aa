"""Fields of the Deployment that a mutating admission webhook or policy changed, removed or added. Pure.

The API server computes `metadata.managedFields` before admission: a field of the operator's manifest stays the
operator's there, and an added field has no owner. So values are compared, and the fields that may be added are listed:
all others can be defaults of the API server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from fastgen_operator.children.strategic_merge import MERGE_KEYS
from fastgen_operator.kinds import Object
from fastgen_operator.plan.foreign import foreign_fields
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
# What a message shows of a value.
_SHOWN: Final = 60


@dataclass(frozen=True, slots=True)
class RewrittenField:
    """A field that differs from what the operator applied; `change` tells how, for example `from 1 to 2`."""

    name: str
    change: str

    def __str__(self) -> str:
        return f"{self.name} {self.change}"


def rewritten_fields(manifest: Object, live: Object) -> tuple[RewrittenField, ...]:
    """Return the fields that admission changed, removed or added, by name.

    Args:
        manifest: the Deployment that the operator applied last.
        live: the Deployment, of which the operator has lost no field to another manager.
    """
    others = tuple(field.name for field in foreign_fields(live))
    found = _differences("spec", manifest["spec"], live["spec"], "")
    unowned = (field for field in found if not field.name.startswith(others))
    return tuple(sorted(unowned, key=lambda field: field.name))


def _differences(name: str, wanted: Any, live: Any, path: str) -> Iterator[RewrittenField]:
    """Yield the differences of the field `name`; `path` is that of its parent."""
    here = f"{path}.{name}" if path and name[0] != "[" else f"{path}{name}"
    if isinstance(wanted, dict) and isinstance(live, dict):
        yield from _of_map(name, wanted, live, here)
    elif isinstance(wanted, list) and isinstance(live, list):
        yield from _of_list(name, wanted, live, here)
    elif not _is_same(wanted, live):
        # A variable's value can be a credential.
        secret = name == "value" and ".env[" in here
        yield RewrittenField(here, "changed" if secret else f"from {_shown(wanted)} to {_shown(live)}")


def _of_map(name: str, wanted: Object, live: Object, here: str) -> Iterator[RewrittenField]:
    # The API server drops empty values.
    yield from (
        RewrittenField(f"{here}.{key}", "removed") for key, value in wanted.items() if value and key not in live
    )
    for key, value in live.items():
        if key in wanted:
            yield from _differences(key, wanted[key], value, here)
        elif name in _FREE or (key in _NOT_DEFAULTED and here.startswith("spec.template.spec")):
            yield RewrittenField(f"{here}.{key}", "added")


def _of_list(name: str, wanted: list[Any], live: list[Any], here: str) -> Iterator[RewrittenField]:
    key = MERGE_KEYS.get(name)
    keys = [item.get(key) for item in wanted if isinstance(item, dict)]
    if key is None or len(set(map(str, keys))) < len(wanted):
        # A list that is replaced as a whole, or whose items cannot be told apart by this key.
        for index, (item, stored) in enumerate(zip(wanted, live, strict=False)):
            yield from _differences(f"[{index}]", item, stored, here)
        if len(wanted) != len(live):
            yield RewrittenField(here, f"from {len(wanted)} to {len(live)} items")
        return
    items = dict(zip(map(str, keys), wanted, strict=True))
    labels = {str(stored.get(key)) for stored in live}
    yield from (RewrittenField(f"{here}[{label}]", "removed") for label in items if label not in labels)
    for stored in live:
        label = str(stored.get(key))
        if label in items:
            yield from _of_map(name, items[label], stored, f"{here}[{label}]")
        else:
            yield RewrittenField(f"{here}[{label}]", "added")


def _is_same(wanted: Any, live: Any) -> bool:
    if wanted == live:
        return True
    # The API server stores quantities in another form.
    number = quantity(wanted)
    return number is not None and number == quantity(live)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
