"""What the picker needs of API objects.

Each function raises LookupError, TypeError, ValueError or AttributeError for a faulty object.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from fastgen_gateway.routing.model_table import Exposed
from fastgen_operator.kinds import Key, Kind, Object
from fastgen_operator.labels_and_annotations import CANARY_SUFFIX, OWNER_LABEL

ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
_SERVICE_LABEL = "kubernetes.io/service-name"
# Of the port of a replica's Service (`fastgen_operator.children.service`).
_PORT_NAME = "http"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The ready addresses in one EndpointSlice.

    Attributes:
        deployment: namespace and name of the FastGenDeployment.
        is_canary: whether they are the canary's replicas, which have a Service of their own.
        addresses: by pod (its uid, or else the address), IP address and port.
        pods: names of the pods, by IP address and port.
    """

    deployment: Key
    is_canary: bool
    addresses: dict[str, str]
    pods: dict[str, str]


def exposed(resource: Object) -> Exposed | None:
    """Return what the gateway serves of a FastGenDeployment; None if it is not exposed or being deleted."""
    metadata, spec = resource["metadata"], resource["spec"]
    if not (spec.get("gateway") or {}).get("expose") or metadata.get("deletionTimestamp"):
        return None
    name = metadata["name"]
    percent = ((resource.get("status") or {}).get("canary") or {}).get("percent", 0)
    return Exposed(
        metadata["namespace"],
        name,
        spec["model"].get("servedName") or name,
        metadata["creationTimestamp"],
        min(100, max(0, int(percent))),
    )


def endpoints(resource: Object) -> Endpoints | None:
    """Return the ready addresses of an EndpointSlice; None if it belongs to no Service."""
    metadata = resource["metadata"]
    labels = metadata.get("labels") or {}
    service, owner = labels.get(_SERVICE_LABEL), str(labels.get(OWNER_LABEL) or "")
    if not service or resource.get("addressType") == "FQDN":
        return None
    ports = [port["port"] for port in resource.get("ports") or () if port.get("name") == _PORT_NAME]
    addresses, pods = {}, {}
    for endpoint in resource.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        # A missing condition `ready` means true.
        if conditions.get("ready") is False or conditions.get("terminating") or not ports:
            continue
        # All addresses of an endpoint are the same pod: clients use the first one.
        ip = ip_address(endpoint["addresses"][0])
        host = f"[{ip}]" if ip.version == 6 else str(ip)
        pod = endpoint.get("targetRef") or {}
        address = addresses[pod.get("uid") or str(ip)] = f"{host}:{ports[0]}"
        pods[address] = str(pod.get("name") or "")
    is_canary = owner != "" and service == f"{owner}{CANARY_SUFFIX}"
    return Endpoints((metadata["namespace"], owner if is_canary else service), is_canary, addresses, pods)
