"""Remember which resources need no reconcile, so that the resync of a large fleet costs little."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import is_
from typing import Any, Final

from fastgen_operator.autoscale.scrape.served_model import ServedModel
from fastgen_operator.autoscale.watchlist import Record
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import Key, Object
from fastgen_operator.plan.observed import Observed

# A remembered resource is reconciled again after this time, even if nothing has changed.
TRUST: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a reconcile of a settled resource reads, except the time.

    Attributes:
        objects: from the informer cache, which replaces an object when it changes: they are compared by identity.
        name_holder: the resource that has the model's name at the gateway.
        measured: what the status shows of the served model, and of the autoscaler's measurements and decision. Of the
            capacity, only whether it is known: a new estimate alone need not reach the status at once. Of the demand,
            only whether the status is outdated, as after a restart of the operator.
    """

    platform: Platform
    objects: tuple[Any, ...]
    name_holder: Key | None
    measured: tuple[Any, ...]

    def are(self, other: Inputs) -> bool:
        """Return whether a reconcile would read the same."""
        return (
            self.platform is other.platform
            and (self.name_holder, self.measured) == (other.name_holder, other.measured)
            and len(self.objects) == len(other.objects)
            and all(map(is_, self.objects, other.objects))
        )


def inputs_of(
    observed: Observed, platform: Platform, record: Record | None, model: ServedModel | None = None
) -> Inputs:
    """Return the inputs of a reconcile, as observed in the cache and by the autoscaler's loop."""
    pods = (*observed.pods, *observed.fetch_pods, *observed.canary_pods)
    objects = (observed.resource, *observed.children.values(), *observed.replica_sets, *pods)
    measured = (model, *(() if record is None else _measured(record, observed.resource)))
    return Inputs(platform, objects, observed.name_holder, measured)


def _measured(record: Record, resource: Object) -> tuple[Any, ...]:
    decision, speeds = record.decision, record.speeds
    shown = resource.get("status", {}).get("autoscaling", {}).get("demandTokensPerSecond")
    outdated = decision is not None and decision.sizing is not None and decision.sizing.differs(shown)
    return (
        decision,
        outdated,
        record.told,
        record.states,
        speeds.stragglers,
        speeds.capacity is not None,
        record.shown_learning,
    )


@dataclass(slots=True)
class Settled:
    """The inputs of a resource's last reconcile, if it is settled.

    A settled resource had nothing to do and was Ready, with all pods ready. Of such a resource neither a child nor the
    status depends on the time, except by its schedules.
    """

    _known: tuple[datetime, datetime, Inputs] | None = None

    def is_settled(self, inputs: Inputs, now: datetime) -> bool:
        """Return whether a reconcile with these inputs has nothing to do."""
        if (known := self._known) is None:
            return False
        # False if the clock was set back.
        return known[0] <= now < known[1] and inputs.are(known[2])

    def remember(self, inputs: Inputs, now: datetime, due: datetime | None) -> None:
        """Record that a reconcile had nothing to do, and has nothing to do until `due`."""
        trusted = now + TRUST
        self._known = now, trusted if due is None else min(trusted, due), inputs

    def forget(self) -> None:
        """Record that the last reconcile had something to do."""
        self._known = None
