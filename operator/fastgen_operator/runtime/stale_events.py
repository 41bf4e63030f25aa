"""Events about kinds that cannot be read.

They are on the operator's Lease, because FastGenDeployments may be unreadable, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from fastgen_operator.kinds import Object
from fastgen_operator.kube.sources import Source, Sources, describe
from fastgen_operator.reconcile.events import Recorder
from fastgen_operator.status.status import Notice


@dataclass(slots=True)
class StaleEvents:
    """Records when a source fails, and when it can be read again. For one thread at a time.

    Attributes:
        lease: returns the Lease while this operator holds it; None on a standby and without leader election, where no
            Events are recorded.
    """

    sources: Sources
    recorder: Recorder
    lease: Callable[[], Object | None]
    now: Callable[[], datetime]
    _failing: frozenset[Source] = frozenset()
    _told: frozenset[Source] = frozenset()

    def record(self) -> None:
        """Record Events for sources that failed at the last call and at this, and for those that recovered.

        When the API server fails for a moment, all sources fail, which is not worth Events.
        """
        failures = self.sources.failures()
        lasting, self._failing = self._failing & failures.keys(), frozenset(failures)
        if (lease := self.lease()) is None:
            return
        told = frozenset(source for source in self._told if source in failures)
        for source in sorted(lasting - told, key=describe):
            words = f"{describe(source)} cannot be read: {failures[source]}; the operator retries"
            self.recorder.record(lease, Notice("Warning", "KindStale", words), self.now())
        for source in sorted(self._told - told, key=describe):
            self.recorder.record(
                lease, Notice("Normal", "KindRead", f"{describe(source)} can be read again"), self.now()
            )
        self._told = told | lasting
