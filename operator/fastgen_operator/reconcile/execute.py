"""Executes plans: writes in order, with Events. A rejected write does not stop the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.children.template import explain_refusal
from fastgen_operator.kinds import DEPLOYMENT, JOB, NETWORK_POLICY, OPTIONAL_KINDS, POD, Kind, Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.labels_and_annotations import APPLIED_ANNOTATION
from fastgen_operator.objects.container import image_volumes_of
from fastgen_operator.objects.managed_fields import foreign_managers
from fastgen_operator.objects.stored import applied_fingerprint, has_same_spec, name_of
from fastgen_operator.plan.adoption import Adopt
from fastgen_operator.plan.changes import Apply
from fastgen_operator.plan.foreign_fields import take_over
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Delete, Plan, Problem, combine
from fastgen_operator.reconcile.backoff import FREE_RESTORES, Contention
from fastgen_operator.reconcile.events import Recorder
from fastgen_operator.scale_down.order import DELETION_COST, SetDeletionCost
from fastgen_operator.status.conditions.progressing import IMAGE_VOLUMES_DISABLED
from fastgen_operator.status.status import Notice

logger = logging.getLogger(__name__)

# Results of `_lost` if no field has another manager: another operator replaced the child, or it was deleted.
_FINGERPRINT: Final = f"metadata.annotations[{APPLIED_ANNOTATION}]"
_EVERYTHING: Final = "all"


@dataclass(slots=True)
class _Outcome:
    """The result of a plan's writes. `created` has the kinds and names of new children."""

    problems: list[Problem]
    failures: list[KubeError] = field(default_factory=list)
    created: list[str] = field(default_factory=list)

    def errors(self) -> int:
        return len(self.problems) + len(self.failures)


@dataclass(slots=True)
class PlanExecutor:
    """Executes the plans of one resource."""

    client: KubeClient
    recorder: Recorder
    now: Callable[[], datetime]
    contention: Contention = field(default_factory=Contention)
    _written: dict[tuple[Kind, str], str] = field(default_factory=dict)

    def run(
        self, plan: Plan, observed: Observed, unreadable: Mapping[tuple[Kind, str], KubeError] | None = None
    ) -> tuple[Observed, Problem | None]:
        """Execute the plan; return what is observed afterwards, and the problem that kept it from being completed.

        Args:
            unreadable: children that could not be looked up, and are not written, with the error.

        Raises:
            KubeError: the API server failed, an object has changed since it was read, or the namespace is being
                deleted. If the server responded to an apply with an error, the other writes were made, except those
                that depend on it.
        """
        outcome = _Outcome([] if plan.problem is None else [plan.problem])
        try:
            observed = self._apply_all(plan, observed, unreadable or {}, outcome)
        finally:
            if outcome.created:
                *others, last = outcome.created
                self._announce(observed, f"{', '.join(others)} and {last} created" if others else f"{last} created")
        for end in plan.ends:
            if (ended := self.client.end_job(end.job.obj)) is not None:
                self._announce(observed, f"Job {end.job.name} {end.why}")
                observed = observed.with_child(JOB, ended)
        for delete in plan.deletes:
            try:
                observed = self._delete(delete, observed)
            except KubeError as error:
                if not error.is_refusal:
                    raise
                words = f"deleting the {delete.kind.name} {name_of(delete.child)} was refused: {error}"
                outcome.problems.append(Problem("ApplyRefused", words))
        if outcome.failures:
            raise outcome.failures[0]
        return observed, combine(outcome.problems)

    def adopt(self, adopts: Sequence[Adopt], observed: Observed) -> Observed:
        """Become the controller of children, and return what is observed afterwards.

        Raises:
            KubeError: the API server failed, or a child has changed.
        """
        for adopt in adopts:
            live = self.client.set_owners(adopt.kind, adopt.child, adopt.references)
            name = name_of(adopt.child)
            if live is None:
                observed = observed.without_child(adopt.kind, name)
                continue
            self._announce(observed, f"{adopt.kind.name} {name} adopted: no existing object controlled it")
            observed = observed.with_child(adopt.kind, live)
        return observed

    def is_due(self, plan: Plan, observed: Observed) -> bool:
        """Return whether the plan applies the Deployment, and no backoff delays the apply."""
        return any(
            apply.kind == DEPLOYMENT and not self._is_held(apply, self._lost(apply, observed)) for apply in plan.applies
        )

    def _apply_all(
        self,
        plan: Plan,
        observed: Observed,
        unreadable: Mapping[tuple[Kind, str], KubeError],
        outcome: _Outcome,
    ) -> Observed:
        """Apply the plan's children, and return what is observed afterwards.

        Raises:
            KubeError: no write can succeed now: the API server does not respond or is overloaded, or the namespace is
                being deleted.
        """
        unprotected = False
        for apply in plan.applies:
            if unprotected and apply.kind in (DEPLOYMENT, JOB) and observed.child(apply.kind, apply.name) is None:
                words = f"the {apply.kind.name} is not created before its NetworkPolicy"
                outcome.problems.append(Problem("ApplyRefused", words))
                continue
            before = outcome.errors()
            try:
                if (unknown := unreadable.get((apply.kind, apply.name))) is not None:
                    raise unknown
                observed = self._apply(apply, observed, plan.deletion_costs, outcome)
            except KubeError as error:
                if error.is_namespace_leaving or not error.is_answer:
                    raise
                outcome.failures.append(error)
            unprotected |= apply.kind == NETWORK_POLICY and outcome.errors() > before
        return observed

    def _apply(self, apply: Apply, observed: Observed, costs: Sequence[SetDeletionCost], outcome: _Outcome) -> Observed:
        """Apply a child, and return what is observed afterwards.

        A rejection or a hold is a problem of the outcome.

        Raises:
            KubeError: the API server failed, the child has changed since it was read, or the namespace is being
                deleted.
        """
        lost = self._lost(apply, observed)
        before = observed.child(apply.kind, apply.name)
        if self._is_held(apply, lost):
            outcome.problems.append(_contended(apply, str(lost), before))
            return observed
        try:
            if (unsupported := self._unsupported(apply, before)) is not None:
                outcome.problems.append(unsupported)
                return self._apply_instead(apply, observed, before, outcome)
            for cost in costs if (apply.kind, apply.name) == (DEPLOYMENT, observed.key[1]) else ():
                # Before the pods are deleted, and only if they are.
                self._set_deletion_cost(cost, observed)
            if apply.take_over and before is not None:
                before = self._take_over(apply, before)
            live = self.client.apply(apply.kind, apply.manifest, before)
        except KubeError as error:
            if error.status == 404 and apply.kind in OPTIONAL_KINDS:
                return observed  # its CRD was removed
            if not error.is_refusal:
                raise
            outcome.problems.append(_refused(apply, error, observed))
            return self._apply_instead(apply, observed, before, outcome)
        self._note(apply, lost, observed, live, outcome.created)
        if apply.kind != JOB and applied_fingerprint(apply.manifest) != applied_fingerprint(live):
            outcome.problems.append(_never_converges(apply))
        return observed.with_child(apply.kind, live)

    def _apply_instead(self, apply: Apply, observed: Observed, before: Object | None, outcome: _Outcome) -> Observed:
        if apply.instead is None or before is None:
            return observed
        return self._apply(apply.instead, observed.with_child(apply.kind, before), (), outcome)

    def _unsupported(self, apply: Apply, before: Object | None) -> Problem | None:
        """Return the problem of a Deployment whose image volumes the API server would drop, without a message.

        It keeps them if the Deployment has some. Source: dropImageVolumes in k8s.io/kubernetes/pkg/api/pod/util.go.
        """
        if apply.kind != DEPLOYMENT or (before is not None and _image_volumes(before)):
            return None
        wanted = _image_volumes(apply.manifest)
        if not wanted or _image_volumes(self.client.try_apply(apply.kind, apply.manifest)):
            return None
        named = " and ".join(f"{name} with the image {image}" for name, image in wanted)
        return Problem(
            IMAGE_VOLUMES_DISABLED,
            f"the API server would drop the volume {named}, because its feature gate ImageVolume is off: turn it on, "
            "also for the kubelets (it is on from Kubernetes 1.35), or use another source in spec.model.source; the "
            "pods stay unchanged",
        )

    def _take_over(self, apply: Apply, before: Object) -> Object | None:
        """Take over fields that the apply then removes, all in one change of the pod template; return the live object.

        The cache has no complete `managedFields`, so the object is read again.
        """
        live = self.client.get(apply.kind, before["metadata"]["namespace"], apply.name)
        if live is None:
            return None
        read = live if has_same_spec(before, live) else before
        return self.client.replace_managers(apply.kind, read, take_over(live, apply.take_over))

    def _set_deletion_cost(self, deletion_cost: SetDeletionCost, observed: Observed) -> None:
        try:
            self.client.annotate(POD, deletion_cost.pod.obj, {DELETION_COST: deletion_cost.cost})
        except KubeError as error:
            if not error.is_refusal:
                raise
            # Continue: without the cost another pod may be deleted, but without the next write none is.
            logger.warning("%s/%s: writing a pod's deletion cost: %s", *observed.key, error)

    def _lost(self, apply: Apply, observed: Observed) -> str | None:
        """Return what another writer changed since this operator applied the same manifest; None if nothing.

        Another operator uses the same field manager: it takes no ownership, but writes another fingerprint.
        """
        written = self._written.get((apply.kind, apply.name))
        if apply.drift is not None or written is None or written != applied_fingerprint(apply.manifest):
            return apply.drift
        live = observed.child(apply.kind, apply.name)
        return _EVERYTHING if live is None else _FINGERPRINT

    def _is_held(self, apply: Apply, lost: str | None) -> bool:
        return lost is not None and self.contention.is_held(apply.kind, apply.name, self.now())

    def _delete(self, delete: Delete, observed: Observed) -> Observed:
        name = name_of(delete.child)
        if not self.client.delete(delete.kind, delete.child):
            return observed
        self._written.pop((delete.kind, name), None)
        self._announce(observed, f"{delete.kind.name} {name} {delete.why}")
        return observed.without_child(delete.kind, name)

    def _note(self, apply: Apply, lost: str | None, observed: Observed, live: Object, created: list[str]) -> None:
        """Remember what was written, and announce it. New children are added to `created`, for one Event about all."""
        name = name_of(live)
        self._written[apply.kind, name] = applied_fingerprint(apply.manifest)
        if lost is not None:
            # Also if the apply had no effect, because a webhook undid it.
            self.contention.note(apply.kind, name, self.now())
        before = observed.child(apply.kind, name)
        if before is None and lost is None:
            created.append(f"{apply.kind.name} {name}")
            return
        if before is not None and before["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]:
            return
        why = apply.why
        if lost == _FINGERPRINT and before is not None:
            why = f"restored: it had been replaced by {' or '.join(foreign_managers(before)) or 'another operator'}"
        self._announce(observed, f"{apply.kind.name} {name} {why}")

    def _announce(self, observed: Observed, message: str) -> None:
        logger.info("%s/%s: %s", *observed.key, message)
        self.recorder.record(observed.resource, Notice("Normal", "Applied", message), self.now())


def _image_volumes(deployment: Object) -> tuple[tuple[str, str], ...]:
    return image_volumes_of(deployment.get("spec", {}).get("template", {}).get("spec", {}))


def _refused(apply: Apply, error: KubeError, observed: Observed) -> Problem:
    if apply.kind == DEPLOYMENT:
        words = explain_refusal(str(error), Spec.model_validate(observed.resource["spec"]))
        if words is not None:
            return Problem("PodTemplateRefused", words)
    return Problem("ApplyRefused", f"the {apply.kind.name} was refused: {error}")


def _never_converges(apply: Apply) -> Problem:
    """Return the problem of a child that lacks its fingerprint right after the apply, as admission changed it."""
    return Problem(
        "Contended",
        f"a mutating admission webhook or policy rewrites {_FINGERPRINT} of {apply.kind.name} {apply.name} in every "
        "write: to find it, run kubectl get mutatingwebhookconfigurations and, if the cluster has them, kubectl get "
        "mutatingadmissionpolicies",
    )


def _contended(apply: Apply, lost: str, live: Object | None) -> Problem:
    name = apply.name
    doing = "deleting" if lost == _EVERYTHING else f"changing {lost} of"
    managers = () if live is None else foreign_managers(live)
    by = f", as field manager {' or '.join(managers)}" if managers else ""
    find = f"run kubectl get {apply.kind.plural} {name} --show-managed-fields --output yaml"
    if lost == _EVERYTHING:
        # Nothing of the deleted object is left.
        find = "look for a controller or policy that cleans up, and for the deletion in the API server's audit log"
    is_scaled = lost == "spec.replicas"
    remedy = "; a HorizontalPodAutoscaler must scale the FastGenDeployment, not its Deployment" if is_scaled else ""
    return Problem(
        "Contended",
        f"another writer keeps {doing} {apply.kind.name} {name}{by}: restored {FREE_RESTORES} times "
        f"within an hour, and now with a growing backoff; to find the other writer, {find}{remedy}",
    )
