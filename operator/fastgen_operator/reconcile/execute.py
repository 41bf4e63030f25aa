"""Executes plans: writes in order, each with an Event. A rejected write does not stop the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from fastgen_operator.api import Spec
from fastgen_operator.children.template import explain_refusal
from fastgen_operator.kinds import DEPLOYMENT, NETWORK_POLICY, OPTIONAL_KINDS, POD, Key, Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Apply, Delete, Plan, Problem, SetDeletionCost, combine
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
        """Execute the plan; return what is observed afterwards, and the problems that kept it from being completed.

        Raises:
            KubeError: the API server failed, or the namespace is being deleted. The writes that do not depend on the
                failed one were made.
        """
        for deletion_cost in plan.deletion_costs:
            self._set_deletion_cost(deletion_cost, observed)
        problems = [] if plan.problem is None else [plan.problem]
        failures: list[KubeError] = []
        unprotected = False
        for apply in plan.applies:
            if apply.kind == DEPLOYMENT and observed.deployment is None and unprotected:
                problems.append(Problem("ApplyRefused", "the Deployment is not created before its NetworkPolicy"))
                continue
            before = len(problems) + len(failures)
            try:
                observed = self._apply(apply, observed, problems)
            except KubeError as error:
                if error.is_namespace_leaving or not error.is_answer:
                    raise
                failures.append(error)
            unprotected |= apply.kind == NETWORK_POLICY and len(problems) + len(failures) > before
        for delete in plan.deletes:
            try:
                observed = self._delete(delete, observed)
            except KubeError as error:
                if not error.is_refusal or error.is_namespace_leaving:
                    raise
                name = delete.child["metadata"]["name"]
                problems.append(Problem("ApplyRefused", f"deleting the {delete.kind.name} {name} was refused: {error}"))
        if failures:
            raise failures[0]
        return observed, combine(problems)

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted resource."""
        self.contention.forget(key)

    def _apply(self, apply: Apply, observed: Observed, problems: list[Problem]) -> Observed:
        """Apply a child, and return what is observed afterwards; add a rejection or a hold to the problems.

        Raises:
            KubeError: the API server failed, or the namespace is being deleted.
        """
        if self._is_held(apply, observed):
            problems.append(_contended(apply))
            return observed
        try:
            live = self.client.apply(apply.kind, apply.manifest)
        except KubeError as error:
            if error.status == 404 and apply.kind in OPTIONAL_KINDS:
                return observed  # its CRD was removed
            if not error.is_refusal or error.is_namespace_leaving:
                raise
            problems.append(_refused(apply, error, observed))
            return observed if apply.instead is None else self._apply(apply.instead, observed, problems)
        self._note(apply, observed, live)
        return observed.with_child(apply.kind, live)

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

    def _delete(self, delete: Delete, observed: Observed) -> Observed:
        name = delete.child["metadata"]["name"]
        self.client.delete(delete.kind, delete.child)
        self._announce(observed, f"{delete.kind.name} {name} {delete.why}")
        return observed.without_child(delete.kind, name)

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


def _refused(apply: Apply, error: KubeError, observed: Observed) -> Problem:
    if apply.kind == DEPLOYMENT:
        words = explain_refusal(str(error), Spec.model_validate(observed.resource["spec"]))
        if words is not None:
            return Problem("PodTemplateRefused", words)
    return Problem("ApplyRefused", f"the {apply.kind.name} was refused: {error}")


def _contended(apply: Apply) -> Problem:
    name = apply.manifest["metadata"]["name"]
    return Problem(
        "Contended",
        f"another writer keeps changing {apply.drift} of {apply.kind.name} {name}: restored {FREE_RESTORES} times "
        f"within an hour, and now with a growing backoff; to find the other writer, run "
        f"kubectl get {apply.kind.plural} {name} --show-managed-fields --output yaml",
    )
