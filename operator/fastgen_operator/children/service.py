"""What leads to the replicas: Service, PodMonitor, InferencePool; and the ServiceAccount of their pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastgen_operator.children.metadata import HTTP_PORT, child, labels, selector
from fastgen_operator.kinds import INFERENCE_POOL, OWNER_LABEL, POD_MONITOR, SERVICE, SERVICE_ACCOUNT, Object

# Name and port of a pool's endpoint picker in the chart of the Gateway API inference extension.
PICKER_SUFFIX: Final = "-epp"
PICKER_PORT: Final = 9002


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


def build_pod_monitor(owner: Object, extra_labels: Mapping[str, str]) -> Object:
    """Build the PodMonitor; `extra_labels` are added to it, so that a Prometheus can select it."""
    name = owner["metadata"]["name"]
    spec = {
        "selector": {"matchLabels": selector(name)},
        # Two FastGenDeployments can serve models of the same name: the label fastgen_dev_deployment separates them.
        "podTargetLabels": [OWNER_LABEL],
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
    }
    return child(POD_MONITOR, owner, {"spec": spec}, labels={**extra_labels, **labels(name)})


def build_inference_pool(owner: Object) -> Object:
    """Build the InferencePool of the serving pods, with the Service NAME-epp as its endpoint picker."""
    name = owner["metadata"]["name"]
    spec = {
        "selector": {"matchLabels": selector(name)},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "name": f"{name}{PICKER_SUFFIX}",
            "port": {"number": PICKER_PORT},
            # Without the picker, the gateway still routes, only less well.
            "failureMode": "FailOpen",
        },
    }
    return child(INFERENCE_POOL, owner, {"spec": spec})
