"""Properties of the cluster and settings of the operator that apply to all resources.

`PodSettings` has those of pods: pull secrets, user ids, proxy and certificate authorities. `Neighbours` has those of
NetworkPolicies.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from fastgen_operator.kinds import (
    CLAIM,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    INFERENCE_POOL,
    JOB,
    NETWORK_POLICY,
    OPTIONAL_KINDS,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)

# A NetworkPolicyPeer or NetworkPolicyEgressRule.
Rule = dict[str, Any]

DNS_PORTS: Final = (53,)
CLUSTER_DNS: Final[tuple[Rule, ...]] = (
    {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    },
    # Link-local address of NodeLocal DNSCache.
    {"ipBlock": {"cidr": "169.254.20.10/32"}},
)
# Anything by HTTPS, and the agent of EKS Pod Identity, which has the credentials for S3.
MODEL_SOURCES: Final[tuple[Rule, ...]] = (
    {"ports": [{"port": 443, "protocol": "TCP"}]},
    {
        "to": [{"ipBlock": {"cidr": "169.254.170.23/32"}}, {"ipBlock": {"cidr": "fd00:ec2::23/128"}}],
        "ports": [{"port": 80, "protocol": "TCP"}],
    },
)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Peers and rules for the NetworkPolicies of all resources.

    Attributes:
        operator: peers that select the operator's pods.
        gateway: peers that select the gateway's pods; used if a resource is exposed there.
        prometheus: peers that select Prometheus; used if PodMonitors are created.
        dns: peers that select the cluster's DNS servers.
        dns_ports: ports of the DNS servers' pods, which can differ from their Service's.
        model_sources: egress rules for pods that download a model.
    """

    operator: tuple[Rule, ...] = ()
    gateway: tuple[Rule, ...] = ()
    prometheus: tuple[Rule, ...] = ()
    dns: tuple[Rule, ...] = CLUSTER_DNS
    dns_ports: tuple[int, ...] = DNS_PORTS
    model_sources: tuple[Rule, ...] = MODEL_SOURCES


UNKNOWN_NEIGHBOURS: Final = Neighbours()

# Unprivileged user of the engine image.
USER_ID: Final = 65532
_CA_VOLUME: Final = "ca-bundle"
_CA_FOLDER: Final = "/etc/fastgen-ca"
_CA_FILE: Final = f"{_CA_FOLDER}/ca.crt"
# Python's ssl with httpx, requests, and boto3 read one of these each.
_CA_VARIABLES: Final = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What the pods of all resources have in common.

    Attributes:
        http_proxy, https_proxy: URLs of the proxies for outgoing connections; empty for none.
        no_proxy: names and addresses that are reached without a proxy, separated by commas.
        ca_config_map: ConfigMap in each resource's namespace with the certificate authorities to trust; empty for
            those of the image.
        ca_key: its key with the certificates, in PEM.
        image_pull_secrets: names of Secrets in each resource's namespace, with which the kubelet pulls the images.
        fixed_user: run as `USER_ID`. False leaves user and groups to the cluster, as OpenShift requires.
        pod_template: restricted refuses a spec.podTemplate that violates the restricted Pod Security Standard; any
            accepts it.
    """

    http_proxy: str = ""
    https_proxy: str = ""
    no_proxy: str = ""
    ca_config_map: str = ""
    ca_key: str = "ca.crt"
    image_pull_secrets: tuple[str, ...] = ()
    fixed_user: bool = True
    pod_template: Literal["restricted", "any"] = "restricted"

    @property
    def environment(self) -> list[dict[str, str]]:
        """Variables of every container that makes outgoing connections."""
        proxies = {"HTTP_PROXY": self.http_proxy, "HTTPS_PROXY": self.https_proxy}
        values = {name: url for name, url in proxies.items() if url}
        if values and self.no_proxy:
            values["NO_PROXY"] = self.no_proxy
        if self.ca_config_map:
            values |= dict.fromkeys(_CA_VARIABLES, _CA_FILE)
        return [{"name": name, "value": value} for name, value in values.items()]

    @property
    def volumes(self) -> list[dict[str, Any]]:
        """Volumes of every pod."""
        if not self.ca_config_map:
            return []
        items = [{"key": self.ca_key, "path": "ca.crt"}]
        return [{"name": _CA_VOLUME, "configMap": {"name": self.ca_config_map, "items": items}}]

    @property
    def mounts(self) -> list[dict[str, Any]]:
        """Mounts of every container that makes outgoing connections."""
        return [{"name": _CA_VOLUME, "mountPath": _CA_FOLDER, "readOnly": True}] if self.ca_config_map else []

    @property
    def security_context(self) -> dict[str, Any]:
        """Security context of every pod."""
        user = {"runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID} if self.fixed_user else {}
        # Changing the owner of each file of a large volume would delay every start.
        once = {"fsGroupChangePolicy": "OnRootMismatch"}
        return {"runAsNonRoot": True, **user, **once, "seccompProfile": {"type": "RuntimeDefault"}}

    @property
    def egress(self) -> list[dict[str, Any]]:
        """NetworkPolicy egress rules to the proxies. A name can have any address, so only its port is restricted."""
        rules = []
        for url in dict.fromkeys(filter(None, (self.http_proxy, self.https_proxy))):
            parts = urlsplit(url)
            rule: dict[str, Any] = {"ports": [{"port": parts.port or _PORTS[parts.scheme], "protocol": "TCP"}]}
            if (block := _as_block(parts.hostname or "")) is not None:
                rule["to"] = [{"ipBlock": {"cidr": block}}]
            rules.append(rule)
        return rules


PLAIN_PODS: Final = PodSettings()


# Kinds that serving does not depend on. An administrator can disable them.
DISPENSABLE_KINDS: Final = (NETWORK_POLICY, *OPTIONAL_KINDS)


@dataclass(frozen=True, slots=True)
class Platform:
    """Properties of the cluster and the operator's configuration that the children depend on.

    Attributes:
        engine_image: default image of the engine.
        optional_kinds: members of OPTIONAL_KINDS whose CRDs are installed.
        without: names of DISPENSABLE_KINDS that are disabled.
        neighbours: peers for NetworkPolicies.
        pod_monitor_labels: labels to add to every PodMonitor.
        pods: settings of all pods.
        has_gateway: whether there is a gateway: the operator asks it which deployments have requests, and its picker
            serves InferencePools.
        pickers: IP addresses of the gateway's pods that are ready, all of one family; sorted. None while they are
            unknown: what leads to them stays as it is.
        headroom_class: PriorityClass of placeholder pods; empty for none, and no such pods.
    """

    engine_image: str
    optional_kinds: frozenset[Kind] = frozenset()
    without: frozenset[str] = frozenset()
    neighbours: Neighbours = UNKNOWN_NEIGHBOURS
    pod_monitor_labels: tuple[tuple[str, str], ...] = ()
    pods: PodSettings = PLAIN_PODS
    has_gateway: bool = False
    pickers: tuple[str, ...] | None = None
    headroom_class: str = ""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of children that can exist here, including disabled ones that are still to be deleted."""
        optional = (kind for kind in OPTIONAL_KINDS if kind in self.optional_kinds)
        always = (SERVICE_ACCOUNT, SERVICE, NETWORK_POLICY, POD_DISRUPTION_BUDGET, DEPLOYMENT, CLAIM, JOB)
        follows_pickers = self.can_have_pools and self.pickers is not None
        return (*always, *optional, *((ENDPOINT_SLICE,) if follows_pickers else ()))

    @property
    def can_have_pools(self) -> bool:
        """Whether InferencePools with the gateway's picker can exist here, if only to be deleted."""
        return self.has_gateway and INFERENCE_POOL in self.optional_kinds

    @property
    def makes_pools(self) -> bool:
        """Whether deployments that the gateway serves get an InferencePool. Without a gateway it would name nobody."""
        return self.has_gateway and self.makes(INFERENCE_POOL)

    def makes(self, kind: Kind) -> bool:
        """Return whether children of `kind` are created."""
        return kind in self.kinds and kind.name not in self.without


def _as_block(host: str) -> str | None:
    try:
        return str(ipaddress.ip_network(host))
    except ValueError:
        return None
