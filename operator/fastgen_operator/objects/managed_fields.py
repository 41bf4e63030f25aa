"""Entries of `metadata.managedFields`: what this operator applied, and what other managers own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastgen_operator.kinds import Object

FIELD_MANAGER: Final = "fastgen-operator"


def applied_entry(obj: Object) -> dict[str, Any] | None:
    """Return this operator's entry of `metadata.managedFields`, which server-side apply keeps, or None."""
    return next((dict(entry) for entry in obj["metadata"].get("managedFields") or () if is_applied_entry(entry)), None)


def is_applied_entry(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of `metadata.managedFields` lists what this operator applied."""
    return entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"


def foreign_entries(obj: Object) -> tuple[dict[str, Any], ...]:
    """Return the entries of `metadata.managedFields` of other managers that own a part of the spec.

    Entries of subresources, such as `scale`, are left out.
    """
    return tuple(
        entry
        for entry in obj["metadata"].get("managedFields") or ()
        if entry.get("manager") != FIELD_MANAGER
        and not entry.get("subresource")
        and "f:spec" in entry.get("fieldsV1", {})
    )


def foreign_managers(obj: Object) -> tuple[str, ...]:
    """Return the names of the managers in `foreign_entries`, sorted."""
    return tuple(sorted({str(entry["manager"]) for entry in foreign_entries(obj)}))
