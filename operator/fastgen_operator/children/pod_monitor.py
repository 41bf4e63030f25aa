"""The PodMonitor: tells a Prometheus of the Prometheus operator to scrape the engines."""

from __future__ import annotations

from collections.abc import Mapping

from fastgen_operator.children.metadata import child, selector
from fastgen_operator.kinds import OWNER_LABEL, POD_MONITOR, Object


def build_pod_monitor(owner: Object, labels: Mapping[str, str]) -> Object:
    """The PodMonitor; `labels` are more of its own, by which a Prometheus chooses the monitors that it follows."""
    spec = {
        "selector": {"matchLabels": selector(owner["metadata"]["name"])},
        # Two FastGenDeployments may serve models of one name: this label, fastgen_dev_deployment, keeps them apart.
        "podTargetLabels": [OWNER_LABEL],
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics"}],
    }
    monitor = child(POD_MONITOR, owner, spec)
    metadata = monitor["metadata"]
    return {**monitor, "metadata": {**metadata, "labels": {**labels, **metadata["labels"]}}}
