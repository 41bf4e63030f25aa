"""The Service in front of the replicas, and the ServiceAccount that their pods run as."""

from __future__ import annotations

from fastgen_operator.children.metadata import HTTP_PORT, child, selector
from fastgen_operator.kinds import SERVICE, SERVICE_ACCOUNT, Object


def build_service(owner: Object) -> Object:
    """Build the ClusterIP Service on the engine's port."""
    spec = {
        "selector": selector(owner["metadata"]["name"]),
        "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    return child(SERVICE, owner, {"spec": spec})


def endpoint_url(namespace: str, name: str) -> str:
    """Return the base URL for OpenAI clients inside the cluster."""
    return f"http://{name}.{namespace}.svc:{HTTP_PORT}/v1"


def build_service_account(owner: Object) -> Object:
    """Build a ServiceAccount without a mounted token: the engine never calls the API server."""
    return child(SERVICE_ACCOUNT, owner, {"automountServiceAccountToken": False})
