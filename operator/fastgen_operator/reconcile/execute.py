"""A plan becomes writes, in the plan's order; what was written is announced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from fastgen_operator.kinds import OPTIONAL_KINDS, POD, Key, Kind, Object
from fastgen_operator.kube.events import Notice, Recorder
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Apply, Delete, Plan, Problem, SetDeletionCost
from fastgen_operator.plan.rollout import DELETION_COST
from fastgen_operator.reconcile.backoff import FREE_RESTORES, Contention

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """What plans are written with; `kube.Kube` is the real one."""

    def apply(self, kind: Kind, manifest: Object) -> Object:
        """Server-side apply; returns the live object."""
        ...

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        """Sets annotations on exactly this object; returns it, or None where it is gone."""
        ...

    def delete(self, kind: Kind, child: Object) -> None:
        """Deletes exactly this object, if it is still there."""
        ...


@dataclass(slots=True)
class PlanExecutor:
    """Carries out plans, one of a resource at a time."""

    writer: Writer
    recorder: Recorder
    now: Callable[[], datetime]
    contention: Contention = field(default_factory=Contention)

    def run(self, plan: Plan, observed: Observed) -> tuple[Observed, Problem | None]:
        """Writes the plan; returns the observed as it is then, and why the rest could not be written.

        Raises:
            KubeError: the API server failed, or the namespace is being deleted.
        """
        for weigh in plan.weighs:
            self._set_deletion_cost(weigh, observed)
        held: Problem | None = None
        for apply in plan.applies:
            if self._is_held(apply, observed):
                held = held or _contended(apply)
                continue
            try:
                live = self.writer.apply(apply.kind, apply.manifest)
            except KubeError as error:
                if error.status == 404 and apply.kind in OPTIONAL_KINDS:
                    continue  # its CRD has just gone
                if not error.is_refusal or error.is_namespace_leaving:
                    raise
                return observed, Problem("ApplyRefused", f"the {apply.kind.name} was refused: {error}")
            self._note(apply, observed, live)
            observed = observed.with_child(apply.kind, live)
        for delete in plan.deletes:
            self._delete(delete, observed)
            observed = observed.without_child(delete.kind, delete.child["metadata"]["name"])
        return observed, plan.problem or held

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self.contention.forget(key)

    def _set_deletion_cost(self, weigh: SetDeletionCost, observed: Observed) -> None:
        try:
            self.writer.annotate(POD, weigh.pod, {DELETION_COST: weigh.cost})
        except KubeError as error:
            if not error.is_refusal or error.is_namespace_leaving:
                raise
            # Without the costs it is the wrong pod that goes; without the write that follows it would be none.
            logger.warning("%s/%s: writing a pod's deletion cost: %s", *observed.key, error)

    def _is_held(self, apply: Apply, observed: Observed) -> bool:
        name = apply.manifest["metadata"]["name"]
        return apply.drift is not None and self.contention.is_held(observed.key, apply.kind, name, self.now())

    def _delete(self, delete: Delete, observed: Observed) -> None:
        self.writer.delete(delete.kind, delete.child)
        self._announce(observed, f"{delete.kind.name} {delete.child['metadata']['name']} {delete.why}")

    def _note(self, apply: Apply, observed: Observed, live: Object) -> None:
        name = live["metadata"]["name"]
        before = observed.child(apply.kind, name)
        if before is not None and before["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]:
            return
        if apply.drift is not None:
            self.contention.note(observed.key, apply.kind, name, self.now())
        self._announce(observed, f"{apply.kind.name} {name} {apply.why}")

    def _announce(self, observed: Observed, message: str) -> None:
        logger.info("%s/%s: %s", *observed.key, message)
        self.recorder.record(observed.resource, Notice("Normal", "Applied", message), self.now())


def _contended(apply: Apply) -> Problem:
    name = apply.manifest["metadata"]["name"]
    return Problem(
        "Contended",
        f"somebody keeps changing {apply.drift} of {apply.kind.name} {name}: restored {FREE_RESTORES} times "
        f"within an hour, from now on more and more seldom; the other writer is named by "
        f"kubectl get {apply.kind.plural} {name} --show-managed-fields --output yaml",
    )
