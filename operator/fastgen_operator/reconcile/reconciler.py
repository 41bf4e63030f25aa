"""One reconcile of one FastGenDeployment: observe, plan, apply, status. It keeps no state that a later one needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.loop import FIXED_PERIODS
from fastgen_operator.autoscale.watchlist import Watchlist
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import FASTGEN, INFERENCE_POOL, Key, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.metrics import Metrics
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.broken_gpus import next_replacement
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Plan, Problem, find_fault, make_plan, parse_spec
from fastgen_operator.plan.pod_failures import Failure
from fastgen_operator.plan.situation import Situation
from fastgen_operator.plan.subject import mode_of, subject_of
from fastgen_operator.reconcile.backoff import is_within
from fastgen_operator.reconcile.events import Recorder
from fastgen_operator.reconcile.execute import PlanExecutor
from fastgen_operator.reconcile.free_gpus import FreeGPUs
from fastgen_operator.reconcile.nodes import Nodes
from fastgen_operator.reconcile.observe import needs_reconciles, observe, unpacked
from fastgen_operator.reconcile.older_crd import DroppedFields
from fastgen_operator.reconcile.pod_events import PodEvents
from fastgen_operator.reconcile.settled import Inputs, Settled, inputs_of
from fastgen_operator.status.conditions.pods_scheduled import pods_short_of_gpus
from fastgen_operator.status.status import (
    Notice,
    build_status,
    scaling_notice,
    schedule_notice,
    shows_ready,
    transition_notice,
    unread_status,
)

logger = logging.getLogger(__name__)

# A resource whose reconciles have failed for this long gets a condition.
_FAILURE_GRACE: Final = timedelta(seconds=3)


class _Memory:
    """What reconciles of one resource remember. It speeds up or delays work; no result depends on it.

    No locks: one thread at a time reconciles a resource.
    """

    def __init__(self, client: KubeClient, now: Callable[[], datetime]) -> None:
        self.failing_since: datetime | None = None
        self.due: datetime | None = None
        self.sent: dict[str, Any] | None = None
        self.settled = Settled()
        self.pod_events = PodEvents(client)
        self.recorder = Recorder(client)
        self.executor = PlanExecutor(client, self.recorder, now)


@dataclass(slots=True)
class Reconciler:
    """Reconciles resources. Several threads may use it, if no two of them reconcile the same resource at a time.

    Attributes:
        cache: what lists, watches and the operator's own writes have shown.
        client: writes, and reads objects that are not watched.
        platform: returns what the cluster offers now in a namespace.
        now: returns the time, with a time zone, for transition times and Events.
        read_loads: returns the tokens in flight, by pod name, of the pods that serve a model and answer in time.
        operator_class: the class of the resources to reconcile; None for those without a class.
        is_stale: returns whether the replicas of a namespace cannot be counted now: their number then stays as it is.
    """

    cache: InformerCache
    client: KubeClient
    metrics: Metrics
    platform: Callable[[str], Platform]
    watchlist: Watchlist
    now: Callable[[], datetime]
    read_loads: Callable[[Sequence[Pod], str], Mapping[str, float]]
    operator_class: str | None = None
    is_stale: Callable[[str], bool] = lambda _: False
    nodes: Nodes = field(init=False)
    free_gpus: FreeGPUs = field(init=False)
    dropped: DroppedFields = field(default_factory=DroppedFields)
    _memories: dict[Key, _Memory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.client)
        self.free_gpus = FreeGPUs(self.client)

    def reconcile(self, key: Key) -> Problem | None:
        """Make the children match the spec, and the status the children.

        Returns:
            What prevents it, to be retried; None if nothing does, or if the resource is gone, being deleted or another
            operator's.

        Raises:
            KubeError: the API server failed, or another writer came first; to be retried. If this lasts, the status
                reports it, as it does any other exception.
        """
        if (memory := self._memories.get(key)) is None:
            memory = self._memories[key] = _Memory(self.client, self.now)
        try:
            problem = self._reconcile(key, memory)
        except Exception as error:
            self._report_failure(key, memory, error)
            raise
        memory.failing_since = None
        return problem

    def unsettled(self, keys: Iterable[Key]) -> list[Key]:
        """Return the resources for which a reconcile may have something to do now.

        The others, of which nothing has changed, count as skipped: an alert fires if neither reconciles nor skipped
        ones are counted. A later change queues its resource, so this may run beside reconciles.
        """
        now, found = self.now(), []
        for key in keys:
            if self._is_settled(key, now):
                self.metrics.skipped.inc()
            else:
                found.append(key)
        return found

    def _is_settled(self, key: Key, now: datetime) -> bool:
        memory, platform = self._memories.get(key), self.platform(key[0])
        try:
            observed = observe(self.cache, key, platform.kinds, self.operator_class)
            if observed is None or memory is None:
                return False
            return memory.settled.is_settled(self._inputs(observed, platform), now)
        except Exception:
            # Its reconcile fails and is reported; the resync goes on with the others.
            logger.debug("%s/%s: comparing the inputs", *key, exc_info=True)
            return False

    def seconds_until_due(self, key: Key) -> float | None:
        """Return the seconds until the next start or end of a schedule or replacement of a pod, or None.

        Negative if the time has passed. None if no such time is known.
        """
        memory = self._memories.get(key)
        return None if memory is None or memory.due is None else (memory.due - self.now()).total_seconds()

    def _reconcile(self, key: Key, memory: _Memory) -> Problem | None:
        platform, now = self.platform(key[0]), self.now()
        if memory.due is not None and memory.due <= now:
            # Not again and again, if this reconcile does not get far enough to find the next time.
            memory.due = None
        observed = observe(self.cache, key, platform.kinds, self.operator_class)
        if observed is None:
            self._forget(key)
            return None
        inputs = self._inputs(observed, platform)
        if memory.settled.is_settled(inputs, now):
            self.metrics.skipped.inc()
            return None
        memory.settled.forget()
        with self.metrics.reconcile_seconds.time():
            return self._reconcile_changed(unpacked(observed), inputs, platform, memory, now)

    def _reconcile_changed(
        self, observed: Observed, inputs: Inputs, platform: Platform, memory: _Memory, now: datetime
    ) -> Problem | None:
        """Reconcile a resource of which something may have changed."""
        key = observed.key
        spec = find_fault(observed) or parse_spec(observed.resource)
        if isinstance(spec, Problem):
            self._write_status(observed, unread_status(observed, spec, now), memory)
            return spec
        situation = self._situation(observed, spec, memory.pod_events.failures(observed, now), now)
        self._register(situation, memory)
        plan = make_plan(situation, platform)
        if (plan.names_to_look_up or plan.adopts) and not self._is_live(observed):
            # The deletion of its children, or of their owner, arrived before its own, or another operator has just
            # taken it over.
            return None
        # What is looked up is in no watch: a later reconcile has to look it up again.
        is_in_cache = not plan.names_to_look_up
        if plan.adopts:
            situation = replace(situation, observed=memory.executor.adopt(plan.adopts, situation.observed))
            plan = make_plan(situation, platform)
        complete, unreadable = self._fetch(plan, situation, memory)
        if complete is not situation:
            situation = complete
            plan = make_plan(situation, platform)
        if plan.adopts:
            # A child that was looked up, because its watch is late.
            situation = replace(situation, observed=memory.executor.adopt(plan.adopts, situation.observed))
            plan = make_plan(situation, platform)
        try:
            observed, problem = memory.executor.run(plan, situation.observed, unreadable)
        except KubeError as error:
            if not error.is_namespace_leaving:
                raise
            logger.debug("%s/%s: the namespace is being deleted, and the resource with it", *key)
            return None
        if observed is not situation.observed:
            situation = replace(situation, observed=observed)
        situation = replace(situation, canary=plan.canary)
        status = build_status(situation, problem, plan.rewritten)
        is_written = self._write_status(observed, status, memory)
        self.metrics.set_replicas(key, status["desiredReplicas"], status["readyReplicas"])
        is_served = all(pod.state == "Ready" for pod in situation.supply)
        is_done = plan.writes_nothing and not is_written
        is_steady = is_served and shows_ready(status) and plan.canary is None
        if is_in_cache and is_done and is_steady and not self.is_stale(key[0]):
            memory.settled.remember(inputs, now, situation.timetable.due)
        return problem

    def _inputs(self, observed: Observed, platform: Platform) -> Inputs:
        uid = observed.resource["metadata"]["uid"]
        known = self.watchlist.lookup(observed.key, uid), self.watchlist.served_model(observed.key, uid)
        return inputs_of(observed, platform, *known)

    def _report_failure(self, key: Key, memory: _Memory, error: Exception) -> None:
        """Write the status of a resource whose reconciles keep failing, so that it does not stay at an old success."""
        now = self.now()
        memory.failing_since = memory.failing_since or now
        if is_within(_FAILURE_GRACE, memory.failing_since, now):
            return
        observed = observe(self.cache, key, self.platform(key[0]).kinds, self.operator_class)
        if observed is None:
            return
        observed = unpacked(observed)
        problem = _failure_problem(observed.resource, error)
        spec = parse_spec(observed.resource)
        try:
            if isinstance(spec, Problem):
                status = unread_status(observed, problem, now)
            else:
                situation = self._situation(observed, spec, {}, now)
                self._register(situation, memory)
                status = build_status(replace(situation, canary=situation.canary_before), problem)
        except Exception:
            # The status of the children may be what fails.
            logger.exception("%s/%s: computing the status", *key)
            status = unread_status(observed, problem, now)
        try:
            self._write_status(observed, status, memory)
        except KubeError as also:
            logger.debug("%s/%s: reporting a failure: %s", *key, also)

    def _forget(self, key: Key) -> None:
        """Drop the state of a resource that is deleted, or that another operator handles now."""
        self._memories.pop(key, None)
        self.watchlist.forget(key)
        self.metrics.forget(key)

    def _situation(self, observed: Observed, spec: Spec, failures: Mapping[str, Failure], now: datetime) -> Situation:
        """Return the situation: the observed state, with the measurements and the decision of the autoscaler."""
        uid, is_autoscaled = observed.resource["metadata"]["uid"], spec.autoscaling is not None
        starts = self.watchlist.known_starts(observed.key, uid)
        stage = self.watchlist.loading_stage(observed.key)
        platform = self.platform(observed.key[0])
        situation = Situation(
            *(observed, spec, now, failures),
            known_starts=starts,
            loading_stage=stage,
            served_model=self.watchlist.served_model(observed.key, uid),
            has_gateway=platform.has_gateway,
            has_headroom_class=bool(platform.headroom_class),
            num_pickers=len(platform.pickers or ()) if platform.makes(INFERENCE_POOL) else None,
            evidence=self.watchlist.evidence(observed.key, uid),
        )
        if (record := self.watchlist.lookup(observed.key, uid)) is None:
            return situation
        is_usable = is_autoscaled and record.mode == mode_of(spec) and not self.is_stale(observed.key[0])
        return replace(
            situation,
            # Without a decision, the number of replicas stays as it is.
            decision=record.decision if is_usable else None,
            speeds=record.speeds,
            learning=record.shown_learning,
            # The samples of other fleets are too old to order their pods.
            in_flight_tokens=record.in_flight_tokens if is_autoscaled else {},
        )

    def _register(self, situation: Situation, memory: _Memory) -> None:
        """Note when the next reconcile is due, and have the autoscaler measure the fleet."""
        times = (situation.timetable.due, next_replacement(situation))
        memory.due = min((time for time in times if time is not None), default=None)
        period = self.watchlist.scrape_seconds * (FIXED_PERIODS if situation.spec.autoscaling is None else 1)
        self.watchlist.register(situation.observed.key, subject_of(situation, period))

    def _is_live(self, observed: Observed) -> bool:
        """Return whether this resource, with the same uid, still exists and is still this operator's."""
        live = self.client.get(FASTGEN, *observed.key)
        same = live is not None and live["metadata"]["uid"] == observed.resource["metadata"]["uid"]
        return live is not None and same and needs_reconciles(live, self.operator_class)

    def _fetch(
        self, plan: Plan, situation: Situation, memory: _Memory
    ) -> tuple[Situation, dict[tuple[Kind, str], KubeError]]:
        """Add what the plan needs to know; return the same object if there is nothing to add.

        Also return the children that cannot be looked up: a kind that cannot be read stops no other.
        """
        namespace, name = situation.observed.key
        unreadable: dict[tuple[Kind, str], KubeError] = {}
        for kind, child in plan.names_to_look_up:
            try:
                live = self.client.get(kind, namespace, child)
            except KubeError as error:
                if not error.is_answer:
                    raise
                unreadable[kind, child] = error
                continue
            if live is not None:
                situation = replace(situation, observed=situation.observed.with_child(kind, live))
        if plan.loads_to_read and memory.executor.is_due(plan, situation.observed):
            loads = self.read_loads(plan.loads_to_read, situation.spec.model.served_name or name)
            situation = replace(situation, in_flight_tokens=loads)
        if plan.needs_nodes or pods_short_of_gpus(situation):
            situation = replace(situation, nodes=self.nodes.read(self.now()))
        if short := pods_short_of_gpus(situation):
            pod, gpu = short[0][0].obj["spec"], situation.spec.resources.gpu
            best = self.free_gpus.best_node(pod, gpu.resource_name, situation.nodes or (), self.now())
            situation = replace(situation, best_node=best)
        return situation, unreadable

    def _write_status(self, observed: Observed, status: dict[str, Any], memory: _Memory) -> bool:
        """Export the conditions as metrics; write a changed status, and Events for its transitions.

        Return whether it has changed.
        """
        shown = [(condition["type"], condition["status"], condition["reason"]) for condition in status["conditions"]]
        self.metrics.set_conditions(observed.key, shown)
        kept = self.dropped.kept(status, self.now())
        if kept == observed.resource.get("status"):
            return False
        # Events are for changes: what is not stored would be new each time.
        before = observed.resource if kept is status else {**observed.resource, "status": memory.sent or status}
        notices = [make(before, status) for make in (schedule_notice, scaling_notice, transition_notice)]
        if (live := self.client.patch_status(observed.resource, status)) is None:
            logger.debug("%s/%s: deleted during its reconcile", *observed.key)
            return True
        memory.sent = status
        if dropped := self.dropped.learn(status, live.get("status", {}), self.now()):
            words = f"the CRD lacks {', '.join(dropped)}: apply the CRD that belongs to this operator"
            notices.append(Notice("Warning", "OlderCRD", words))
        for notice in filter(None, notices):
            logger.info("%s/%s: %s: %s", *observed.key, notice.reason, notice.message)
            memory.recorder.record(observed.resource, notice, self.now())
        return True


def _failure_problem(resource: Object, error: Exception) -> Problem:
    """Return the problem of a failed reconcile; its message stays while the resource keeps failing.

    Messages of errors can differ in a version or a time, and each new message would be one more write.
    """
    words = str(error) if isinstance(error, KubeError) else f"{type(error).__name__}: {error}"
    about = ("ReconcileFailed", resource["metadata"]["generation"])
    shown = resource.get("status", {}).get("conditions", ())
    earlier = (each["message"] for each in shown if (each["reason"], each["observedGeneration"]) == about)
    return Problem("ReconcileFailed", next(earlier, f"{words}; the operator retries"))
