"""The ServiceAccount: the pods' name for admission, image pull secrets and audit; it opens nothing."""

from __future__ import annotations

from fastgen_operator.children.metadata import child_with
from fastgen_operator.kinds import SERVICE_ACCOUNT, Object


def build_service_account(owner: Object) -> Object:
    """A ServiceAccount of the resource's own, whose token no pod gets: the engine never asks the API server."""
    return child_with(SERVICE_ACCOUNT, owner, {"automountServiceAccountToken": False})
