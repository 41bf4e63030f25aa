"""Names, labels and owner references shared by all children."""

from __future__ import annotations

from typing import Any, Final

from fastgen_operator.kinds import FASTGEN, FETCH_SUFFIX, OWNER_LABEL, Kind, Object

HTTP_PORT: Final = 8000


def selector(name: str) -> dict[str, str]:
    """Return the labels that select the pods. They never change: a Deployment's selector is immutable."""
    return {OWNER_LABEL: name}


def fetch_labels(name: str) -> dict[str, str]:
    """Return the labels of the pods that download the model. They do not match `selector`."""
    return {**labels(name), "app.kubernetes.io/name": "fastgen-fetch", OWNER_LABEL: f"{name}{FETCH_SUFFIX}"}


def labels(name: str) -> dict[str, str]:
    """Return the labels of every child."""
    return {
        "app.kubernetes.io/name": "fastgen-engine",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": "fastgen-operator",
        **selector(name),
    }


def child(kind: Kind, owner: Object, spec: dict[str, Any]) -> Object:
    """Return a child of `kind` with `spec`, with the name of its owner, and garbage-collected with it."""
    return child_with(kind, owner, {"spec": spec})


def child_with(kind: Kind, owner: Object, fields: dict[str, Any]) -> Object:
    """Return a child like `child`, with arbitrary `fields` next to its metadata."""
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
    """Return the non-empty fields: the API server drops empty lists, maps, strings and nulls."""
    return {name: value for name, value in fields.items() if value not in (None, [], {}, "")}
