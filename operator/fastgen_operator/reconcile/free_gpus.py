"""How many GPUs the nodes have free, for the condition of pods that find none.

The scheduler does not say it. Pods of all namespaces hold GPUs, so they are listed node by node when a pod lacks GPUs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from fastgen_operator.children.download_placement import may_run, requests
from fastgen_operator.kinds import POD, Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plan.situation import NodeGPUs
from fastgen_operator.quantities import allocatable
from fastgen_operator.reconcile.backoff import is_within
from fastgen_operator.reconcile.nodes import TRUST

logger = logging.getLogger(__name__)

# More nodes are not looked at: each takes a request.
MOST_NODES: Final = 16


@dataclass(slots=True)
class FreeGPUs:
    """Counts the GPUs that pods leave free; safe to use from several threads."""

    client: KubeClient
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _used: dict[tuple[str, str], tuple[datetime, int | None]] = field(default_factory=dict)

    def best_node(self, pod: Object, resource: str, nodes: Iterable[Object], now: datetime) -> NodeGPUs | None:
        """Return the GPUs of the node with the most free ones, or None if they are unknown.

        It is unknown if no node that the pod may run on has any, if more than `MOST_NODES` have, and without the right
        to list the pods of all namespaces. What was counted is reused for `nodes.TRUST`.

        Args:
            pod: spec of the pod that lacks GPUs.
            resource: name of the GPUs' extended resource.
            nodes: all nodes.
        """
        totals = {
            node["metadata"]["name"]: allocatable(node, resource) for node in nodes if may_run(pod, node, (resource,))
        }
        names = [name for name, total in totals.items() if total]
        if not names or len(names) > MOST_NODES:
            return None
        found: list[NodeGPUs] = []
        with self._lock:
            self._used = {key: counted for key, counted in self._used.items() if is_within(TRUST, counted[0], now)}
            for name in names:
                used = self._counted(name, resource, now)
                if used is None:
                    return None
                found.append(NodeGPUs(max(0, totals[name] - used), totals[name]))
        return max(found)

    def _counted(self, node: str, resource: str, now: datetime) -> int | None:
        if (node, resource) not in self._used:
            self._used[node, resource] = now, self._count(node, resource)
        return self._used[node, resource][1]

    def _count(self, node: str, resource: str) -> int | None:
        """Return how many GPUs the pods on a node hold; None if they cannot be listed."""
        on_node = f"spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed"
        try:
            _, pods = self.client.list(POD, None, fields=on_node)
            return sum(int(requests(pod["spec"]).get(resource, 0)) for pod in pods)
        except KubeError as error:
            logger.debug("the pods on node %s cannot be counted: %s", node, error)
            return None
