"""What a tenant may store in a cluster to harm others: deep and large objects."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from cluster.commands import CommandError
from fastgen_operator.kinds import FASTGEN
from harness.chart import CLUSTER_NAME
from harness.probes import wait_policies
from harness.space import resource
from support.namespace import Cluster, Namespace

LIMITS = f"{CLUSTER_NAME}-limits"
BINDING = f"validatingadmissionpolicybinding/{LIMITS}"


@contextlib.contextmanager
def without_limits(space: Namespace[Any]) -> Iterator[None]:
    """Exclude a namespace from the chart's admission policy of limits, as on a cluster without the policy."""
    elsewhere = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [space.name]}
    _select(space.cluster, {"matchExpressions": [elsewhere]})
    try:
        yield
    finally:
        _select(space.cluster, None)


def _select(cluster: Cluster, namespaces: object) -> None:
    patch = {"spec": {"matchResources": {"namespaceSelector": namespaces}}}
    cluster.kubectl("patch", BINDING, "--type", "merge", "--patch", json.dumps(patch))
    wait_policies(cluster)


def deep(levels: int, shape: str = "map") -> str:
    """Return the JSON of a pod spec nested that many levels: maps in maps, or lists in a list. Not by recursion."""
    if shape == "list":
        return '{"a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    return '{"a":' * levels + "1" + "}" * levels


def manifest(name: str, pod_spec: str, metadata: str = "") -> str:
    """Return the JSON of a FastGenDeployment with this JSON as `spec.podTemplate.spec`, and more metadata."""
    text = json.dumps(resource(name, replicas=0, podTemplate={"spec": "POD"}))
    return text.replace('"POD"', pod_spec).replace('"metadata": {', f'"metadata": {{{metadata}', 1)


def create(space: Namespace[Any], name: str, pod_spec: str, *args: str, metadata: str = "") -> str:
    """Create a FastGenDeployment with this JSON as `spec.podTemplate.spec`. Raises CommandError."""
    query = "?dryRun=All" if args else ""
    path = FASTGEN.path(space.name) + query
    words = manifest(name, pod_spec, metadata)
    return str(space.cluster.kubectl("create", "--raw", path, "--filename", "-", stdin=words))


def refusal(space: Namespace[Any], name: str, pod_spec: str) -> str:
    """Return why the API server rejects such a FastGenDeployment; empty if it accepts it. It is not stored."""
    try:
        create(space, name, pod_spec, "--dry-run=server")
    except CommandError as error:
        return str(error)
    return ""
