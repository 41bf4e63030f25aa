"""Kubernetes quantities. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

# Source: kubernetes.io, "Quantity".
_QUANTITY: Final = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)([KMGTPE]i|[numkMGTPE])?")
_SUFFIXES: Final = {
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("num", -3)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
}


def quantity(value: Any) -> Decimal | None:
    """Return the number that a quantity such as 1536Mi stands for; None if it is not a quantity."""
    match = _QUANTITY.fullmatch(str(value))
    return None if match is None else Decimal(match[1]) * _SUFFIXES[match[2] or ""]


def allocatable(node: Mapping[str, Any], resource: str) -> int:
    """Return how many of an extended resource a node has for pods; 0 if it has none."""
    return int(quantity(node["status"]["allocatable"].get(resource, 0)) or 0)
