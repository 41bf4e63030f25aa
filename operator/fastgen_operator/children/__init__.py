"""Builders of the child objects: pure functions from the desired state to manifests for server-side apply.

A manifest contains exactly the fields that the operator owns. Empty fields are omitted, because the API server drops
them. The builders return what is special to a child; `Desired.child` adds what all children have.
"""

from __future__ import annotations

from fastgen_operator.children.canary import CanaryPods, build_canary
from fastgen_operator.children.deployment import build_deployment, build_disruption_budget
from fastgen_operator.children.desired import Desired
from fastgen_operator.children.inference_pool import build_inference_pool
from fastgen_operator.children.model_cache import build_claim
from fastgen_operator.children.network_policy import build_network_policies
from fastgen_operator.children.node_headroom import build_headroom
from fastgen_operator.children.service import build_pod_monitor, build_service, build_service_account
from fastgen_operator.kinds import (
    CLAIM,
    DEPLOYMENT,
    JOB,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    POD_MONITOR,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Object,
)

# A child's kind and manifest.
Children = tuple[tuple[Kind, Object], ...]


def build_children(
    desired: Desired,
    template: Object | None,
    job: Object | None = None,
    canary: CanaryPods | None = None,
    held_revision: str = "",
) -> Children:
    """Build the children in the order in which they are applied.

    Args:
        template: the pod template; None for no Deployment yet.
        job: the download to start, if any.
        canary: the pods of a new revision that is tried, if any.
        held_revision: the revision of a template that is not the spec's; empty for the spec's.
    """
    cache = desired.spec.cache if desired.spec.model.is_downloaded else None
    built = (
        # Pods need their ServiceAccount, Service and NetworkPolicy from the start: apply these before the Deployment.
        (SERVICE_ACCOUNT, build_service_account()),
        (SERVICE, build_service(desired.selector)),
        *((NETWORK_POLICY, policy) for policy in build_network_policies(desired, template if held_revision else None)),
        (POD_DISRUPTION_BUDGET, build_disruption_budget(desired)),
        (DEPLOYMENT, None if template is None else build_deployment(desired, template, held_revision)),
        *([] if canary is None else build_canary(desired, canary)),
        (DEPLOYMENT, None if template is None else build_headroom(desired, template)),
        (POD_MONITOR, build_pod_monitor(desired, desired.selector)),
        *(build_inference_pool(desired) if desired.platform.makes_pools and desired.spec.gateway.expose else []),
        # After the Deployment: a volume that cannot grow must not block scaling.
        (CLAIM, None if cache is None else build_claim(desired, cache)),
        (JOB, job),
    )
    makes = desired.platform.makes
    return tuple((kind, desired.child(kind, each)) for kind, each in built if each is not None and makes(kind))
