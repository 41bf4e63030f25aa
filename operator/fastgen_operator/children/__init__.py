"""Builders of the children: pure functions from a resource to manifests for server-side apply.

A manifest holds exactly the fields that the operator owns, without empty ones, which the API server would drop.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastgen_operator.api import Spec
from fastgen_operator.children.deployment import build_deployment
from fastgen_operator.children.service import build_service
from fastgen_operator.kinds import DEPLOYMENT, SERVICE, Kind, Object


@dataclass(frozen=True, slots=True)
class Platform:
    """What the children depend on beside the spec.

    Attributes:
        engine_image: the engine's image where a spec names none.
    """

    engine_image: str

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of children that may be made here."""
        return (SERVICE, DEPLOYMENT)


def build_children(owner: Object, spec: Spec, platform: Platform, replicas: int) -> tuple[tuple[Kind, Object], ...]:
    """All children that the spec asks for, in the order in which they are written; `replicas` is the number wanted."""
    return (
        # The Service first: its name resolves by the time that a pod is ready.
        (SERVICE, build_service(owner)),
        (DEPLOYMENT, build_deployment(owner, spec, platform.engine_image, replicas)),
    )
