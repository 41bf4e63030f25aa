"""Builders of the children: pure functions from a resource to manifests for server-side apply.

A manifest holds exactly the fields that the operator owns, without empty ones, which the API server would drop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.children.deployment import build_deployment
from fastgen_operator.children.disruption_budget import build_disruption_budget
from fastgen_operator.children.inference_pool import build_inference_pool
from fastgen_operator.children.model_cache import build_claim
from fastgen_operator.children.model_source import downloads_in_pods, is_downloaded, is_preloaded
from fastgen_operator.children.network_policy import (
    UNKNOWN_NEIGHBOURS,
    Neighbours,
    build_fetch_policy,
    build_network_policy,
    dns_egress,
)
from fastgen_operator.children.pod_monitor import build_pod_monitor
from fastgen_operator.children.service import build_service
from fastgen_operator.children.service_account import build_service_account
from fastgen_operator.kinds import (
    CLAIM,
    DEPLOYMENT,
    INFERENCE_POOL,
    JOB,
    NETWORK_POLICY,
    OPTIONAL_KINDS,
    POD_DISRUPTION_BUDGET,
    POD_MONITOR,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Object,
)

# Kinds that serving does not need, so that those who run the cluster may do without them.
DISPENSABLE_KINDS: Final = (NETWORK_POLICY, *OPTIONAL_KINDS)


@dataclass(frozen=True, slots=True)
class Platform:
    """What the children depend on beside the spec.

    Attributes:
        engine_image: the engine's image where a spec names none.
        optional_kinds: those of OPTIONAL_KINDS that the cluster has now.
        without: names of DISPENSABLE_KINDS that are not made.
        neighbours: who is who in the cluster's network.
        pod_monitor_labels: labels of every PodMonitor, by which a Prometheus finds it.
    """

    engine_image: str
    optional_kinds: frozenset[Kind] = frozenset()
    without: frozenset[str] = frozenset()
    neighbours: Neighbours = UNKNOWN_NEIGHBOURS
    pod_monitor_labels: tuple[tuple[str, str], ...] = ()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of children that may be here, those that are not made any more included."""
        optional = (kind for kind in OPTIONAL_KINDS if kind in self.optional_kinds)
        always = (SERVICE_ACCOUNT, SERVICE, NETWORK_POLICY, POD_DISRUPTION_BUDGET, DEPLOYMENT, CLAIM, JOB)
        return (*always, *optional)

    def makes(self, kind: Kind) -> bool:
        """Whether children of that kind are made here."""
        return kind in self.kinds and kind.name not in self.without


def build_children(owner: Object, spec: Spec, platform: Platform, replicas: int) -> tuple[tuple[Kind, Object], ...]:
    """All children that the spec asks for, in the order in which they are written; `replicas` is the number wanted.

    Raises:
        TemplateRefused: where spec.podTemplate cannot be obeyed.
    """
    children = (
        # Before the Deployment is what its pods begin with: their account, their name, their walls.
        (SERVICE_ACCOUNT, build_service_account(owner)),
        (SERVICE, build_service(owner)),
        *((NETWORK_POLICY, policy) for policy in _network_policies(owner, spec, platform)),
        (POD_DISRUPTION_BUDGET, build_disruption_budget(owner, spec.disruption.min_available, replicas)),
        (DEPLOYMENT, build_deployment(owner, spec, platform.engine_image, replicas)),
        (POD_MONITOR, build_pod_monitor(owner, dict(platform.pod_monitor_labels))),
        (INFERENCE_POOL, build_inference_pool(owner)),
    )
    # After the Deployment: a volume that cannot grow is no reason not to scale. `modelcache` adds the Job.
    claims = () if spec.cache is None or not is_downloaded(spec) else ((CLAIM, build_claim(owner, spec.cache)),)
    return tuple((kind, manifest) for kind, manifest in (*children, *claims) if platform.makes(kind))


def _network_policies(owner: Object, spec: Spec, platform: Platform) -> tuple[Object, ...]:
    neighbours = platform.neighbours
    prometheus = neighbours.prometheus if platform.makes(POD_MONITOR) else ()
    clients = [peer.model_dump(by_alias=True, exclude_unset=True) for peer in spec.network.allow_from]
    names, download = [dns_egress(neighbours)], [dns_egress(neighbours), *neighbours.model_sources]
    # A policy holds for a pod's whole life: one that downloads its model may reach the source afterwards too.
    egress = download if downloads_in_pods(spec) else names
    serving = build_network_policy(owner, clients, [*neighbours.operator, *prometheus], egress)
    return (serving, build_fetch_policy(owner, download)) if is_preloaded(spec) else (serving,)
