"""The Deployment: how many pods, and how a change replaces them."""

from __future__ import annotations

from fastgen_operator.api import Spec
from fastgen_operator.children.metadata import child, selector
from fastgen_operator.children.template import build_template
from fastgen_operator.kinds import DEPLOYMENT, Object


def build_deployment(owner: Object, spec: Spec, engine_image: str, replicas: int) -> Object:
    """The Deployment of one resource with that many replicas; `engine_image` is used where the spec names none.

    Raises:
        TemplateRefused: where spec.podTemplate cannot be obeyed.
    """
    name = owner["metadata"]["name"]
    return child(
        DEPLOYMENT,
        owner,
        {
            "replicas": replicas,
            "selector": {"matchLabels": selector(name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {
                    "maxSurge": spec.rollout.max_surge,
                    "maxUnavailable": spec.rollout.max_unavailable,
                },
            },
            "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
            "template": build_template(name, spec, engine_image),
        },
    )
