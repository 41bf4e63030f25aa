"""Read the Events of pods without containers and of Jobs without pods.

A cluster has too many Events to watch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from fastgen_operator.kinds import EVENT, Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.pod_events import failure_in_events, lacks_containers, lacks_pods, refusal_in_events
from fastgen_operator.plan.pod_failures import Failure
from fastgen_operator.reconcile.backoff import is_within

logger = logging.getLogger(__name__)

# Shortest time between two reads for one resource.
_INTERVAL: Final = timedelta(seconds=5)
# Stuck objects of a resource whose Events are read: the status names the first one.
_OBJECTS: Final = 3
# Returns the failure that an object's Events name.
_Cause = Callable[[Iterable[Object]], Failure | None]


@dataclass(slots=True)
class PodEvents:
    """Reads the Events of a resource's stuck pods and Jobs, at most once per interval."""

    client: KubeClient
    _at: datetime | None = None
    _known: Mapping[str, Failure] = field(default_factory=dict)

    def failures(self, observed: Observed, now: datetime) -> Mapping[str, Failure]:
        """Return what keeps pods from starting, by the name of the pod or Job.

        Only the Events of the first `_OBJECTS` stuck pods and Jobs are read.
        """
        known = (*observed.pods, *observed.fetch_pods, *observed.canary_pods)
        pods = [pod for pod in known if lacks_containers(pod, now)]
        downloads = [job for job in observed.jobs if lacks_pods(job, observed.fetch_pods, now)]
        causes = {pod.name: (pod.uid, partial(failure_in_events, pod)) for pod in pods}
        causes |= {job.name: (job.uid, partial(refusal_in_events, job)) for job in downloads}
        stuck = sorted(causes)
        if not stuck:
            self._at, self._known = None, {}
        elif self._at is None or not is_within(_INTERVAL, self._at, now):
            reads = ((name, self._read(observed, name, *causes[name])) for name in stuck[:_OBJECTS])
            self._at, self._known = now, {name: failure for name, failure in reads if failure is not None}
        return {name: failure for name, failure in self._known.items() if name in causes}

    def _read(self, observed: Observed, name: str, uid: str, cause: _Cause) -> Failure | None:
        try:
            _, events = self.client.list(EVENT, observed.key[0], fields=f"involvedObject.uid={uid}")
            return cause(events)
        except KubeError as error:
            # What was read before stays, so that the status does not change back and forth.
            logger.debug("%s/%s: reading the Events of %s: %s", *observed.key, name, error)
            return self._known.get(name)
