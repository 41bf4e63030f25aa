"""Reads the Events of pods whose containers are not created. Events are not watched: a cluster has too many."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from fastgen_operator.kinds import EVENT, Key
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.pod_events import failure_in_events, lacks_containers
from fastgen_operator.plan.pod_failures import Failure

logger = logging.getLogger(__name__)

# Shortest time between two reads for one resource.
_INTERVAL: Final = timedelta(seconds=5)
# Pods of a resource to read: the status names the first one.
_PODS: Final = 3


@dataclass(slots=True)
class PodEvents:
    """Reads the Events of stuck pods, at most once per interval for each resource.

    It needs no lock: a resource is reconciled by one thread at a time.
    """

    client: KubeClient
    _read: dict[Key, tuple[datetime, Mapping[str, Failure]]] = field(default_factory=dict)

    def failures(self, observed: Observed, now: datetime) -> Mapping[str, Failure]:
        """Return what keeps pods from starting, by pod name. Reads nothing if all pods have containers."""
        stuck = [pod for pod in (*observed.pods, *observed.fetch_pods) if lacks_containers(pod, now)]
        if not stuck:
            self.forget(observed.key)
            return {}
        at, known = self._read.get(observed.key, (None, {}))
        if at is None or now - at >= _INTERVAL:
            known = {}
            for pod in sorted(stuck, key=lambda pod: str(pod["metadata"]["name"]))[:_PODS]:
                try:
                    _, events = self.client.list(
                        EVENT, observed.key[0], fields=f"involvedObject.uid={pod['metadata']['uid']}"
                    )
                    failure = failure_in_events(pod, events)
                except KubeError as error:
                    # No state depends on Events.
                    logger.debug("%s/%s: reading the Events of a pod: %s", *observed.key, error)
                    continue
                if failure is not None:
                    known[pod["metadata"]["name"]] = failure
            self._read[observed.key] = now, known
        names = {pod["metadata"]["name"] for pod in stuck}
        return {name: failure for name, failure in known.items() if name in names}

    def forget(self, key: Key) -> None:
        """Drop the state of a resource."""
        self._read.pop(key, None)
