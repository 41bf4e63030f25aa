"""One visit to one FastGenDeployment: observe, plan, apply, status. It depends on nothing that an earlier one did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

from fastgen_operator.autoscale.watchlist import Watchlist
from fastgen_operator.children import Platform
from fastgen_operator.kinds import FASTGEN, Key, Kind, Object
from fastgen_operator.kube.events import EventWriter, Recorder
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.metrics import Metrics
from fastgen_operator.plan.observed import Observed, Reader, observe
from fastgen_operator.plan.plan import Plan, Problem, make_plan, parse_spec
from fastgen_operator.plan.rollout import pods_with_deletion_cost
from fastgen_operator.reconcile.execute import PlanExecutor, Writer
from fastgen_operator.status.status import build_status, scaling_notice, transition_notice

logger = logging.getLogger(__name__)


class Cluster(Reader, Writer, EventWriter, Protocol):
    """What a visit needs of the API server; `kube.Kube` is the real one."""

    def look(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object as it is now, watched or not; None where there is none."""
        ...

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object | None:
        """Replaces the resource's status; None where the resource is gone."""
        ...


@dataclass(slots=True)
class Reconciler:
    """Visits resources; safe to use from several threads, one resource at a time each.

    `platform` gives what the cluster offers at the time of a visit; `now` the time for transition times and Events,
    with a time zone; `read_loads` the tokens in flight by name of those pods that say so, if they serve that model.
    """

    cluster: Cluster
    metrics: Metrics
    platform: Callable[[], Platform]
    watchlist: Watchlist
    now: Callable[[], datetime]
    read_loads: Callable[[Sequence[Object], str], Mapping[str, float]]
    _recorder: Recorder = field(init=False)
    _carry_out: PlanExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._recorder = Recorder(self.cluster)
        self._carry_out = PlanExecutor(self.cluster, self._recorder, self.now)

    def reconcile(self, key: Key) -> Problem | None:
        """Brings the children to the spec and the status to the children.

        Returns what stands in the way, where a later visit may find it gone; None where nothing does.

        Raises:
            KubeError: the API server failed, or somebody else wrote first; to be tried again.
        """
        platform = self.platform()
        observed = observe(self.cluster, key, platform.kinds)
        if observed is None:
            self.watchlist.forget(key)
            self.metrics.forget(key)
            self._recorder.forget(key)
            self._carry_out.forget(key)
            return None
        now = self.now()
        observed = replace(observed, at=now)
        spec = parse_spec(observed.resource)
        if isinstance(spec, Problem):
            status = build_status(None, observed, spec, now)
            self._show_conditions(key, status)
            self._report(observed, status)
            return spec
        observed = self.watchlist.look_up(spec, observed)
        plan = make_plan(spec, observed, platform)
        if _creates(plan, observed) and not self._is_there(observed):
            # Its children are being collected, which is the first that is heard of its end; the rest will follow.
            return None
        if (full := self._with_strangers(plan, observed)) is not observed:
            observed = full
            plan = make_plan(spec, observed, platform)
        if plan.loses_pods and not observed.in_flight_tokens:
            # Without autoscaling nobody has asked them yet, and in the steady state nobody needs to know.
            model_name = spec.model.served_name or key[1]
            observed = replace(
                observed, in_flight_tokens=self.read_loads(pods_with_deletion_cost(observed), model_name)
            )
            plan = make_plan(spec, observed, platform)
        try:
            observed, problem = self._carry_out.run(plan, observed)
        except KubeError as error:
            if not error.is_namespace_leaving:
                raise
            logger.debug("%s/%s: its namespace is being deleted, and the resource with it", *key)
            return None
        status = build_status(spec, observed, problem, now)
        self._show_conditions(key, status)
        self._report(observed, status)
        self.metrics.set_replicas(key, status["desiredReplicas"], status["readyReplicas"])
        return problem

    def _show_conditions(self, key: Key, status: dict[str, Any]) -> None:
        shown = [(condition["type"], condition["status"], condition["reason"]) for condition in status["conditions"]]
        self.metrics.set_conditions(key, shown)

    def _is_there(self, observed: Observed) -> bool:
        """Whether the API server, too, has this very resource, and not on its way out."""
        live = self.cluster.look(FASTGEN, *observed.key)
        if live is None or live["metadata"].get("deletionTimestamp"):
            return False
        return bool(live["metadata"]["uid"] == observed.resource["metadata"]["uid"])

    def _with_strangers(self, plan: Plan, observed: Observed) -> Observed:
        """The observed with what already has a name that the plan would create, which only the API server can tell.

        Somebody else's object bears no label of ours, and one of ours may have lost it: neither is watched.
        """
        for apply in plan.applies:
            name = apply.manifest["metadata"]["name"]
            if observed.child(apply.kind, name) is None:
                stranger = self.cluster.look(apply.kind, observed.key[0], name)
                observed = observed if stranger is None else observed.with_child(apply.kind, stranger)
        return observed

    def _report(self, observed: Observed, status: dict[str, Any]) -> None:
        """Writes the status if it says anything new, and an Event if that is a transition."""
        if status == observed.resource.get("status"):
            return
        notices = (scaling_notice(observed.resource, status), transition_notice(observed.resource, status))
        if self.cluster.patch_status(observed.resource, status) is None:
            logger.debug("%s/%s: gone while it was visited", *observed.key)
            return
        for notice in notices:
            if notice is None:
                continue
            logger.info("%s/%s: %s: %s", *observed.key, notice.reason, notice.message)
            self._recorder.record(observed.resource, notice, self.now())


def _creates(plan: Plan, observed: Observed) -> bool:
    """Whether the plan has a child that does not exist yet."""
    return any(observed.child(apply.kind, apply.manifest["metadata"]["name"]) is None for apply in plan.applies)
