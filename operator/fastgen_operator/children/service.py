"""The Service: one address for all ready replicas."""

from __future__ import annotations

from fastgen_operator.children.metadata import HTTP_PORT, child, selector
from fastgen_operator.kinds import SERVICE, Object


def build_service(owner: Object) -> Object:
    """A ClusterIP Service on the engine's port."""
    spec = {
        "selector": selector(owner["metadata"]["name"]),
        "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    return child(SERVICE, owner, spec)


def endpoint_url(namespace: str, name: str) -> str:
    """The base URL for OpenAI clients inside the cluster."""
    return f"http://{name}.{namespace}.svc:{HTTP_PORT}/v1"
