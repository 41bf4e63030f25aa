"""The cluster's nodes, for the placement of downloads and the condition of pods that find no GPUs.

They are read when a download starts or a pod lacks GPUs, and not watched.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from fastgen_operator.kinds import NODE, Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.reconcile.backoff import is_within

logger = logging.getLogger(__name__)

# One list serves all downloads that start at the same time.
TRUST: Final = timedelta(seconds=1)


@dataclass(slots=True)
class Nodes:
    """Reads the nodes; safe to use from several threads."""

    client: KubeClient
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _found: tuple[datetime, tuple[Object, ...] | KubeError] | None = None

    def read(self, now: datetime) -> tuple[Object, ...]:
        """Return the nodes, reduced to what `children/download_placement.py` reads; none without the right to list.

        A list is reused for `TRUST`, and so is a failure: workers that waited for it do not wait once more each.

        Raises:
            KubeError: the API server failed.
        """
        with self._lock:
            if self._found is None or not is_within(TRUST, self._found[0], now):
                try:
                    self._found = now, self._list()
                except KubeError as error:
                    self._found = now, error
            found = self._found[1]
        if isinstance(found, KubeError):
            raise found
        return found

    def _list(self) -> tuple[Object, ...]:
        try:
            _, items = self.client.list(NODE, None)
            return tuple(_trimmed(node) for node in items)
        except KubeError as error:
            if error.status != 403:
                raise
            logger.info(
                "not allowed to list nodes: a download to a new volume requests the extended resources of a replica"
            )
            return ()


def _trimmed(node: Object) -> Object:
    metadata = {"name": node["metadata"]["name"], "labels": node["metadata"].get("labels", {})}
    allocatable = node.get("status", {}).get("allocatable", {})
    taints = node.get("spec", {}).get("taints", [])
    return {"metadata": metadata, "spec": {"taints": taints}, "status": {"allocatable": allocatable}}
