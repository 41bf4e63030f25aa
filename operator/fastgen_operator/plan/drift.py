"""Whether a live object still is what was applied: the fields that the operator owns, compared one by one. Pure."""

from __future__ import annotations

from typing import Any, Final

from kubernetes.utils import parse_quantity

# Fields under which numbers with units are held, which the API server may write in another way.
_QUANTITY_PARENTS: Final = ("limits", "requests", "sizeLimit", "divisor")
# What a podTemplate may say though it says nothing: the API server drops these fields where they are false or 0.
_DROPPED_WHERE_ZERO: Final = (
    *("hostNetwork", "hostPID", "hostIPC", "hostPort", "initialDelaySeconds"),
    *("readOnly", "stdin", "stdinOnce", "tty"),
)
# What tells the items of a list apart, in the order tried; a list of items with none is compared by position.
# Beside our items there may then be others, which a webhook or a person has added.
_ITEM_KEYS: Final = ("uid", "mountPath", "containerPort", "port", "topologyKey", "name")
# What is ours as a whole: one more rule would be a hole, one more label another selection.
_WHOLE: Final = ("spec.ingress", "spec.egress", "spec.selector", "spec.podSelector")


def first_difference(wanted: Any, live: Any, path: str = "") -> str | None:
    """The path of the first wanted field that the live object holds otherwise; None where it holds them all.

    Fields that only the live object has are others' business: defaults, controllers, injected containers.
    """
    if wanted == live:
        # Most of a child, at every visit: the rest is looked at name by name.
        return None
    if live is None and _says_nothing(wanted, path):
        return None
    if isinstance(wanted, dict):
        if not isinstance(live, dict) or (_is_whole(path) and live.keys() - wanted.keys()):
            return path
        for name, value in wanted.items():
            difference = first_difference(value, live.get(name), f"{path}.{name}" if path else name)
            if difference is not None:
                return difference
        return None
    if isinstance(wanted, list):
        return _list_difference(wanted, live, path)
    return None if _same_scalar(wanted, live, path) else path


def _list_difference(wanted: list[Any], live: Any, path: str) -> str | None:
    if not isinstance(live, list):
        return path
    item_key = None if _is_whole(path) else next((key for key in _ITEM_KEYS if _tells_apart(key, wanted)), None)
    if item_key is None:
        if len(wanted) != len(live):
            return path
        pairs = list(zip(wanted, live, strict=True))
    else:
        by_key = {item.get(item_key): item for item in live if isinstance(item, dict)}
        pairs = [(item, by_key.get(item[item_key])) for item in wanted]
    for index, (item, counterpart) in enumerate(pairs):
        label = index if item_key is None else item[item_key]
        difference = first_difference(item, counterpart, f"{path}[{label}]")
        if difference is not None:
            return difference
    return None


def _says_nothing(wanted: Any, path: str) -> bool:
    """Whether a field of a pod template is one that the API server drops. Elsewhere even an empty one may mean much."""
    if not path.startswith("spec.template."):
        return False
    if isinstance(wanted, (bool, int)):
        return not wanted and path.rpartition(".")[2] in _DROPPED_WHERE_ZERO
    return wanted in (None, "", [], {})


def _is_whole(path: str) -> bool:
    return any(path == whole or path.startswith((f"{whole}.", f"{whole}[")) for whole in _WHOLE)


def _tells_apart(key: str, items: list[Any]) -> bool:
    values = {item[key] for item in items if isinstance(item, dict) and key in item}
    return bool(items) and len(values) == len(items)


def _same_scalar(wanted: Any, live: Any, path: str) -> bool:
    parents = path.split(".")
    if live is None or not any(parent in _QUANTITY_PARENTS for parent in parents):
        return False
    try:
        return bool(parse_quantity(wanted) == parse_quantity(live))  # type: ignore[no-untyped-call]
    except ValueError:
        return False
