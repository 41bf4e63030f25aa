"""Children to adopt: the operator has created them, but no existing resource controls them. Pure.

`kubectl delete --cascade=orphan` leaves children without a controller. Those restored from a backup have none, or name
a deleted resource. Other objects with the name of a child are never taken over.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fastgen_operator.children.desired import MANAGED_BY, Desired
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, JOB, Kind, Object
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.objects.stored import is_terminating
from fastgen_operator.plan.observed import Observed


@dataclass(frozen=True, slots=True)
class Adopt:
    """One child to adopt, and the owner references that it gets."""

    kind: Kind
    child: Object
    references: tuple[dict[str, Any], ...]


def adoptions(observed: Observed, wanted: Collection[tuple[Kind, str]], desired: Desired) -> tuple[Adopt, ...]:
    """Return the children to adopt: of those that the spec needs, and of the download Jobs.

    A child that the spec does not need stays without an owner: once adopted, it would be deleted.

    Args:
        wanted: kinds and names of the children that the spec needs.
    """
    owner = observed.resource
    return tuple(
        Adopt(kind, child, _references(child, owner, desired.owner_reference))
        for (kind, name), child in observed.children.items()
        if ((kind, name) in wanted or kind == JOB) and _is_adoptable(kind, child, owner, desired)
    )


def _is_adoptable(kind: Kind, child: Object, owner: Object, desired: Desired) -> bool:
    """Return whether the operator created the child for a resource of this name, and no existing object controls it.

    A child of a deleted resource of that name is adopted only if it is newer than the present resource: then it was
    restored.
    """
    given = child["metadata"].get("labels", {})
    ours = (OWNER_LABEL, MANAGED_BY)
    if is_terminating(child) or any(given.get(label) != desired.labels[label] for label in ours):
        return False
    selectors = (desired.selector, desired.canary_selector, desired.headroom_selector)
    if kind == DEPLOYMENT and child["spec"]["selector"].get("matchLabels") not in selectors:
        return False  # a Deployment's selector is immutable
    return all(_is_former(each, owner) and _is_newer(child, owner) for each in _controllers(child))


def is_left_behind(child: Object, owner: Object) -> bool:
    """Return whether the child belongs to a deleted resource of the owner's name, so that it will be deleted too."""
    found = _controllers(child)
    return bool(found) and all(_is_former(each, owner) and not _is_newer(child, owner) for each in found)


def _is_newer(child: Object, owner: Object) -> bool:
    """Return whether the child was not created before the present owner: then it was restored, not left behind."""
    created, since = (each["metadata"].get("creationTimestamp", "") for each in (child, owner))
    return bool(since) and created >= since


def _is_former(reference: dict[str, Any], owner: Object) -> bool:
    """Return whether the reference names another resource with the owner's name, by its uid."""
    group, _, _ = str(reference["apiVersion"]).partition("/")
    named = (group, reference["kind"], reference["name"]) == (FASTGEN.group, FASTGEN.name, owner["metadata"]["name"])
    return named and reference["uid"] != owner["metadata"]["uid"]


def _controllers(child: Object) -> list[dict[str, Any]]:
    return [each for each in child["metadata"].get("ownerReferences", ()) if each.get("controller")]


def _references(child: Object, owner: Object, reference: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    others = (each for each in child["metadata"].get("ownerReferences", ()) if not _is_former(each, owner))
    return (*(each for each in others if each["uid"] != reference["uid"]), reference)
