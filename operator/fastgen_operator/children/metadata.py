"""Names, labels and ownership that all children share."""

from __future__ import annotations

from typing import Any, Final

from fastgen_operator.kinds import FASTGEN, FETCH_SUFFIX, OWNER_LABEL, Kind, Object

HTTP_PORT: Final = 8000


def selector(name: str) -> dict[str, str]:
    """The labels that pods are found by. They never change: a Deployment's selector is immutable."""
    return {OWNER_LABEL: name}


def fetch_labels(name: str) -> dict[str, str]:
    """The labels of the pods that download the model: none by which serving pods are found."""
    return {**labels(name), "app.kubernetes.io/name": "fastgen-fetch", OWNER_LABEL: f"{name}{FETCH_SUFFIX}"}


def labels(name: str) -> dict[str, str]:
    """The labels of every child."""
    return {
        "app.kubernetes.io/name": "fastgen-engine",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": "fastgen-operator",
        **selector(name),
    }


def child(kind: Kind, owner: Object, spec: dict[str, Any]) -> Object:
    """A child of that kind with that spec, named after its owner and deleted with it."""
    return child_with(kind, owner, {"spec": spec})


def child_with(kind: Kind, owner: Object, fields: dict[str, Any]) -> Object:
    """A child of that kind with those fields beside its metadata, named after its owner and deleted with it."""
    metadata = owner["metadata"]
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": labels(metadata["name"]),
            "ownerReferences": [
                {
                    "apiVersion": FASTGEN.api_version,
                    "kind": FASTGEN.name,
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        **fields,
    }


def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that say something: the API server drops empty lists, maps and nulls, and so do we."""
    return {name: value for name, value in fields.items() if value not in (None, [], {}, "")}
