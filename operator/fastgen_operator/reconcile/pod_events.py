"""Reads the Events of pods without containers and of Jobs without pods.

Events are not watched: a cluster has too many.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from fastgen_operator.kinds import EVENT, Key, Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plan.model_cache import jobs
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.pod_events import failure_in_events, lacks_containers, lacks_pods, refusal_in_events
from fastgen_operator.plan.pod_failures import Failure
from fastgen_operator.reconcile.backoff import is_within

logger = logging.getLogger(__name__)

# Shortest time between two reads for one resource.
_INTERVAL: Final = timedelta(seconds=5)
# Objects of a resource to read: the status names the first one.
_OBJECTS: Final = 3


@dataclass(slots=True)
class PodEvents:
    """Reads the Events of stuck pods and Jobs, at most once per interval for each resource.

    It needs no lock: a resource is reconciled by one thread at a time.
    """

    client: KubeClient
    _read: dict[Key, tuple[datetime, Mapping[str, Failure]]] = field(default_factory=dict)

    def failures(self, observed: Observed, now: datetime) -> Mapping[str, Failure]:
        """Return what keeps pods from starting, by the name of the pod or Job.

        Reads nothing if nothing is stuck.
        """
        pods = [pod for pod in (*observed.pods, *observed.fetch_pods) if lacks_containers(pod, now)]
        downloads = [job for job in jobs(observed) if lacks_pods(job, observed.fetch_pods, now)]
        stuck = [*((pod, failure_in_events) for pod in pods), *((job, refusal_in_events) for job in downloads)]
        if not stuck:
            self.forget(observed.key)
            return {}
        at, known = self._read.get(observed.key, (None, {}))
        if at is None or not is_within(_INTERVAL, at, now):
            before, known = known, {}
            for obj, cause in sorted(stuck, key=lambda pair: _name(pair[0]))[:_OBJECTS]:
                try:
                    _, events = self.client.list(
                        EVENT, observed.key[0], fields=f"involvedObject.uid={obj['metadata']['uid']}"
                    )
                    failure = cause(obj, events)
                except KubeError as error:
                    # What was read before stays, so that the status does not change back and forth.
                    logger.debug("%s/%s: reading the Events of %s: %s", *observed.key, _name(obj), error)
                    failure = before.get(_name(obj))
                if failure is not None:
                    known[_name(obj)] = failure
            self._read[observed.key] = now, known
        names = {_name(obj) for obj, _ in stuck}
        return {name: failure for name, failure in known.items() if name in names}

    def forget(self, key: Key) -> None:
        """Drop the state of a resource."""
        self._read.pop(key, None)


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])
