"""Executes plans: writes in order, each with an Event."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from fastgen_operator.kinds import OPTIONAL_KINDS, POD, Key, Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Apply, Delete, Plan, Problem, SetDeletionCost
from fastgen_operator.plan.rollout import DELETION_COST
from fastgen_operator.reconcile.backoff import FREE_RESTORES, Contention
from fastgen_operator.reconcile.events import Recorder
from fastgen_operator.status.status import Notice

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PlanExecutor:
    """Executes plans, one at a time per resource."""

    client: KubeClient
    recorder: Recorder
    now: Callable[[], datetime]
    contention: Contention = field(default_factory=Contention)

    def run(self, plan: Plan, observed: Observed) -> tuple[Observed, Problem | None]:
        """Execute the plan; return what is observed afterwards, and the problem that kept it from being completed.

        Raises:
            KubeError: the API server failed, or the namespace is being deleted.
        """
        for deletion_cost in plan.deletion_costs:
            self._set_deletion_cost(deletion_cost, observed)
        held: Problem | None = None
        for apply in plan.applies:
            if self._is_held(apply, observed):
                held = held or _contended(apply)
                continue
            try:
                live = self.client.apply(apply.kind, apply.manifest)
            except KubeError as error:
                if error.status == 404 and apply.kind in OPTIONAL_KINDS:
                    continue  # its CRD was removed
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
        """Drop the state of a deleted resource."""
        self.contention.forget(key)

    def _set_deletion_cost(self, deletion_cost: SetDeletionCost, observed: Observed) -> None:
        try:
            self.client.annotate(POD, deletion_cost.pod, {DELETION_COST: deletion_cost.cost})
        except KubeError as error:
            if not error.is_refusal or error.is_namespace_leaving:
                raise
            # Continue: without the cost another pod may be deleted, but without the next write none is.
            logger.warning("%s/%s: writing a pod's deletion cost: %s", *observed.key, error)

    def _is_held(self, apply: Apply, observed: Observed) -> bool:
        name = apply.manifest["metadata"]["name"]
        return apply.drift is not None and self.contention.is_held(observed.key, apply.kind, name, self.now())

    def _delete(self, delete: Delete, observed: Observed) -> None:
        self.client.delete(delete.kind, delete.child)
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
        f"another writer keeps changing {apply.drift} of {apply.kind.name} {name}: restored {FREE_RESTORES} times "
        f"within an hour, and now with a growing backoff; to find the other writer, run "
        f"kubectl get {apply.kind.plural} {name} --show-managed-fields --output yaml",
    )
