"""The Service, PodMonitor and ServiceAccount of the serving pods."""

from __future__ import annotations

from collections.abc import Mapping

from fastgen_operator.children.desired import Desired
from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.objects.container import HTTP_PORT


def build_service(selector: Mapping[str, str]) -> Object:
    """Build the ClusterIP Service on the engine's port, for the pods with these labels."""
    ports = [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"}]
    return {"spec": {"selector": dict(selector), "ports": ports}}


def endpoint_url(namespace: str, name: str) -> str:
    """Return the base URL for OpenAI clients inside the cluster."""
    return f"http://{name}.{namespace}.svc:{HTTP_PORT}/v1"


def build_service_account() -> Object:
    """Build a ServiceAccount without a mounted token: the engine never calls the API server."""
    return {"automountServiceAccountToken": False}


def build_pod_monitor(desired: Desired, selector: Mapping[str, str]) -> Object:
    """Build the PodMonitor of the pods with these labels. It has the labels by which a Prometheus selects it."""
    spec = {
        "selector": {"matchLabels": dict(selector)},
        # Two FastGenDeployments can serve models of the same name: the label fastgen_dev_deployment separates them.
        "podTargetLabels": [OWNER_LABEL],
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
    }
    return {"metadata": {"labels": dict(desired.platform.pod_monitor_labels)}, "spec": spec}
