"""Builders of the child objects: pure functions from a resource to manifests for server-side apply.

A manifest contains exactly the fields that the operator owns. Empty fields are omitted, because the API server drops
them.
"""

from __future__ import annotations

from fastgen_operator.api import Spec
from fastgen_operator.children.deployment import build_deployment, build_disruption_budget
from fastgen_operator.children.model_cache import build_claim
from fastgen_operator.children.model_source import downloads_in_pods, is_downloaded, is_preloaded
from fastgen_operator.children.network_policy import build_fetch_policy, build_network_policy, dns_egress
from fastgen_operator.children.platform import Platform
from fastgen_operator.children.service import (
    build_inference_pool,
    build_pod_monitor,
    build_service,
    build_service_account,
)
from fastgen_operator.kinds import (
    CLAIM,
    DEPLOYMENT,
    INFERENCE_POOL,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    POD_MONITOR,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Object,
)


def build_children(owner: Object, spec: Spec, platform: Platform, replicas: int) -> tuple[tuple[Kind, Object], ...]:
    """Build the children of a spec for `replicas` desired replicas, in the order in which they are applied.

    Raises:
        TemplateRefused: spec.podTemplate cannot be applied.
    """
    children = (
        # Pods need their ServiceAccount, Service and NetworkPolicy from the start: apply these before the Deployment.
        (SERVICE_ACCOUNT, build_service_account(owner)),
        (SERVICE, build_service(owner)),
        *((NETWORK_POLICY, policy) for policy in _network_policies(owner, spec, platform)),
        (POD_DISRUPTION_BUDGET, build_disruption_budget(owner, spec, replicas)),
        (DEPLOYMENT, build_deployment(owner, spec, platform.engine_image, replicas, platform.pods)),
        (POD_MONITOR, build_pod_monitor(owner, dict(platform.pod_monitor_labels))),
        (INFERENCE_POOL, build_inference_pool(owner)),
    )
    # After the Deployment: a volume that cannot grow must not block scaling. `plan/model_cache.py` adds the Job.
    claims = () if spec.cache is None or not is_downloaded(spec) else ((CLAIM, build_claim(owner, spec.cache)),)
    return tuple((kind, manifest) for kind, manifest in (*children, *claims) if platform.makes(kind))


def _network_policies(owner: Object, spec: Spec, platform: Platform) -> tuple[Object, ...]:
    neighbours = platform.neighbours
    prometheus = neighbours.prometheus if platform.makes(POD_MONITOR) else ()
    clients = [peer.model_dump(by_alias=True, exclude_unset=True) for peer in spec.network.allow_from]
    names = [dns_egress(neighbours)]
    download = [*names, *neighbours.model_sources, *platform.pods.egress]
    # A policy applies for a pod's whole life, so a pod that downloads its model keeps access to the source.
    egress = download if downloads_in_pods(spec) else names
    serving = build_network_policy(owner, clients, [*neighbours.operator, *prometheus], egress)
    return (serving, build_fetch_policy(owner, download)) if is_preloaded(spec) else (serving,)
