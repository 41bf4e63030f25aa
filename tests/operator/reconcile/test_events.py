"""Events: deduplication, counts and rate limits. Execution of plans: order, restores and their backoff."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from fastgen_operator.kinds import DEPLOYMENT, JOB, NETWORK_POLICY, POD, Kind, Object
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.labels_and_annotations import APPLIED_ANNOTATION
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.changes import Apply
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Plan
from fastgen_operator.reconcile.backoff import FREE_RESTORES, LONGEST_WAIT, RESTORE_WINDOW, Contention
from fastgen_operator.reconcile.events import BURST, REFILL, Recorder
from fastgen_operator.reconcile.execute import PlanExecutor
from fastgen_operator.reconcile.pod_events import PodEvents
from fastgen_operator.scale_down.order import DELETION_COST, SetDeletionCost
from fastgen_operator.status.status import Notice
from harness.objects import pod, stored

T0 = datetime(2026, 1, 1, tzinfo=UTC)
CRASH = Notice("Warning", "CrashLoopBackOff", "pod x: bang")
KEY = ("space", "chat")


@dataclass
class Fake:
    """A client that records requests in order, and raises the errors in `refuses`."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    refuses: dict[str, KubeError] = field(default_factory=dict)

    def _call(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if name in self.refuses:
            raise self.refuses[name]

    def create_event(self, resource: Object, event: dict[str, Any]) -> str:
        del resource
        self._call("create", event["message"])
        return f"event-{len(self.calls)}"

    def count_event(self, resource: Object, name: str, count: int, time: str) -> None:
        del resource, time
        self._call("count", (name, count))

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        self._call("annotate", (kind.name, obj["metadata"]["name"], annotations))
        return None

    def apply(self, kind: Kind, manifest: Object, _: Object | None) -> Object:
        self._call("apply", kind.name)
        if kind.name in self.refuses:
            raise self.refuses[kind.name]
        return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(len(self.calls))}}

    def delete(self, kind: Kind, child: Object) -> None:
        self._call("delete", (kind.name, child["metadata"]["name"]))


def test_a_notice_repeated_within_the_window_is_counted_on_the_same_event() -> None:
    fake = Fake()
    recorder = Recorder(fake)
    for minute in (0, 4, 8):
        recorder.record(stored(), CRASH, T0 + timedelta(minutes=minute))
    assert fake.calls == [("create", CRASH.message), ("count", ("event-1", 2)), ("count", ("event-1", 3))]
    recorder.record(stored(), CRASH, T0 + timedelta(minutes=8) + RESTORE_WINDOW)
    assert fake.calls[-1] == ("create", CRASH.message)


def test_another_message_or_resource_gets_its_own_event() -> None:
    fake = Fake()
    recorder = Recorder(fake)
    recorder.record(stored(), CRASH, T0)
    recorder.record(stored(), Notice("Warning", "CrashLoopBackOff", "pod y: bang"), T0)
    Recorder(fake).record(stored("other"), CRASH, T0)
    assert [name for name, _ in fake.calls] == ["create"] * 3


def test_events_of_one_resource_are_rate_limited() -> None:
    fake = Fake()
    recorder = Recorder(fake)
    for number in range(200):
        recorder.record(stored(), Notice("Warning", "Flood", f"number {number}"), T0)
    assert len(fake.calls) == BURST
    Recorder(fake).record(stored("other"), CRASH, T0)
    assert len(fake.calls) == BURST + 1, "the others are not silenced"
    for number in range(200):
        recorder.record(stored(), Notice("Warning", "Flood", f"number {number}"), T0 + RESTORE_WINDOW + REFILL)
    assert len(fake.calls) == BURST + 1 + (RESTORE_WINDOW + REFILL) // REFILL


def test_a_clock_that_is_set_back_silences_no_event_and_holds_no_restore() -> None:
    """A node whose hardware clock is hours ahead corrects it after its first pods have started."""
    fake, contention, before = Fake(), Contention(), T0 - timedelta(hours=8)
    recorder = Recorder(fake)
    recorder.record(stored(), CRASH, T0)
    recorder.record(stored(), CRASH, before)
    recorder.record(stored(), Notice("Warning", "CrashLoopBackOff", "pod y: bang"), before)
    assert [name for name, _ in fake.calls] == ["create"] * 3
    for _ in range(FREE_RESTORES + 1):
        contention.note(DEPLOYMENT, "chat", T0)
    assert not contention.is_held(DEPLOYMENT, "chat", before)
    contention.note(DEPLOYMENT, "chat", before)
    assert contention.is_held(DEPLOYMENT, "chat", before), "once, not from now on"


def test_events_of_a_stuck_pod_are_read_at_most_every_five_seconds_whatever_the_clock_does() -> None:
    read: list[str] = []

    class Reader:
        def list(self, kind: Kind, namespace: str, *, fields: str) -> tuple[str, list[Object]]:
            del namespace
            read.append(f"{kind.name} {fields}")
            return "1", []

    client: Any = Reader()
    events, stuck = PodEvents(client), pod()
    stuck["metadata"] |= {"uid": "u", "creationTimestamp": "2025-12-31T00:00:00Z"}
    seen = Observed(stored(), pods=(Pod(stuck),))
    for seconds, reads in ((0, 1), (4, 1), (5, 2), (-8 * 3600, 3), (-8 * 3600 + 4, 3)):
        assert events.failures(seen, T0 + timedelta(seconds=seconds)) == {}
        assert read == ["Event involvedObject.uid=u"] * reads, seconds


def test_the_cause_of_a_stuck_pod_stays_while_its_events_cannot_be_read() -> None:
    warning = {"type": "Warning", "reason": "FailedMount", "message": "no secret", "count": 2}
    answers: list[Object | None] = [None, warning, None, {**warning, "message": "no volume"}, {}]

    class Reader:
        def list(self, *_: object, **__: object) -> tuple[str, list[Object]]:
            answer = answers.pop(0)
            if answer is None:
                raise KubeError(500, "etcdserver: request timed out")
            about = {"involvedObject": {"uid": "u"}, "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}
            return "1", [{**about, **answer}]

    client: Any = Reader()
    events, stuck = PodEvents(client), pod()
    stuck["metadata"] |= {"uid": "u", "creationTimestamp": "2025-12-31T00:00:00Z"}
    seen, said = Observed(stored(), pods=(Pod(stuck),)), []
    for number in range(5):
        found = events.failures(seen, T0 + number * timedelta(seconds=5))
        said.append([failure.message.rpartition(": ")[2] for failure in found.values()])
    assert said == [[], ["no secret"], ["no secret"], ["no volume"], []]


def test_a_deleted_event_is_created_again_and_a_failure_is_no_error() -> None:
    fake = Fake()
    recorder = Recorder(fake)
    recorder.record(stored(), CRASH, T0)
    fake.refuses["count"] = KubeError(404, "not found")
    recorder.record(stored(), CRASH, T0)
    recorder.record(stored(), CRASH, T0)
    assert [name for name, _ in fake.calls] == ["create", "count", "create"]


def test_a_few_restores_are_immediate_and_the_next_ones_back_off() -> None:
    contention, now, made = Contention(), T0, []
    for _ in range(3600):
        if not contention.is_held(DEPLOYMENT, "chat", now):
            contention.note(DEPLOYMENT, "chat", now)
            made.append((now - T0).total_seconds())
        now += timedelta(seconds=1)
    assert made[:FREE_RESTORES] == [0, 1, 2, 3, 4]
    waits = [later - earlier for earlier, later in pairwise(made[4:9])]
    assert waits == [10, 20, 40, 80]
    assert len(made) < 30, "in an hour against a rival that writes every second"
    assert max(later - earlier for earlier, later in pairwise(made)) <= LONGEST_WAIT.total_seconds()


def test_old_restores_expire_and_other_children_are_not_delayed() -> None:
    contention = Contention()
    for _ in range(FREE_RESTORES + 3):
        contention.note(DEPLOYMENT, "chat", T0)
    assert contention.is_held(DEPLOYMENT, "chat", T0)
    assert not contention.is_held(POD, "chat", T0)
    assert not contention.is_held(DEPLOYMENT, "other", T0)
    assert not contention.is_held(DEPLOYMENT, "chat", T0 + RESTORE_WINDOW)


def manifest(fingerprint: str = "mine") -> Object:
    return {"metadata": {"name": "chat", "annotations": {APPLIED_ANNOTATION: fingerprint}}}


def restoring() -> Plan:
    return Plan(applies=(Apply(DEPLOYMENT, manifest(), "restored: spec.replicas had been changed", "spec.replicas"),))


def test_a_delayed_restore_is_a_problem_that_names_the_field_and_how_to_find_the_other_writer() -> None:
    fake = Fake()
    work = PlanExecutor(fake, Recorder(fake), lambda: T0)
    problems = [work.run(restoring(), Observed(resource=stored()))[1] for _ in range(FREE_RESTORES + 2)]
    assert problems[:FREE_RESTORES] == [None] * FREE_RESTORES
    problem = problems[-1]
    assert problem is not None
    assert problem == problems[-2], "the message is stable between reconciles"
    assert problem.reason == "Contended"
    assert "another writer keeps changing spec.replicas of Deployment chat" in problem.message
    assert "kubectl get deployments chat --show-managed-fields" in problem.message
    assert problem.message.endswith("a HorizontalPodAutoscaler must scale the FastGenDeployment, not its Deployment")
    assert [name for name, _ in fake.calls].count("apply") == FREE_RESTORES


def test_an_edit_of_the_spec_is_never_delayed() -> None:
    fake = Fake()
    work = PlanExecutor(fake, Recorder(fake), lambda: T0)
    for _ in range(FREE_RESTORES + 2):
        work.run(restoring(), Observed(resource=stored()))
    edit = Apply(DEPLOYMENT, manifest("another"), "updated to the new spec")
    assert work.run(Plan(applies=(edit,)), Observed(resource=stored()))[1] is None


@pytest.mark.parametrize("kind", [DEPLOYMENT, JOB], ids=["deployment", "job"])
@pytest.mark.parametrize("status", [403, 500], ids=["refused", "failed"])
def test_pods_are_not_created_before_their_network_policy(kind: Kind, status: int) -> None:
    fake = Fake(refuses={NETWORK_POLICY.name: KubeError(status, "no")})
    work = PlanExecutor(fake, Recorder(fake), lambda: T0)
    plan = Plan(applies=(Apply(NETWORK_POLICY, manifest(), "created"), Apply(kind, manifest(), "created")))
    with contextlib.suppress(KubeError):
        _, problem = work.run(plan, Observed(resource=stored()))
        assert problem is not None
        assert problem.message.endswith(f"the {kind.name} is not created before its NetworkPolicy")
    assert ("apply", kind.name) not in fake.calls
    live = Observed(resource=stored()).with_child(kind, {"metadata": {"name": "chat", "resourceVersion": "1"}})
    with contextlib.suppress(KubeError):
        work.run(plan, live)
    assert ("apply", kind.name) in fake.calls, "pods that exist already do not wait"


def scale_down() -> Plan:
    return Plan((SetDeletionCost(Pod(pod()), "7"),), restoring().applies)


def test_the_costs_are_written_before_the_replicas() -> None:
    fake = Fake()
    PlanExecutor(fake, Recorder(fake), lambda: T0).run(scale_down(), Observed(resource=stored()))
    assert fake.calls[0] == ("annotate", ("Pod", "chat-new-x", {DELETION_COST: "7"}))
    assert fake.calls[1] == ("apply", "Deployment")


def test_a_rejected_cost_does_not_stop_the_scale_down_but_a_failure_is_retried() -> None:
    fake = Fake(refuses={"annotate": KubeError(403, "forbidden")})
    PlanExecutor(fake, Recorder(fake), lambda: T0).run(scale_down(), Observed(resource=stored()))
    assert ("apply", "Deployment") in fake.calls
    fake = Fake(refuses={"annotate": KubeError(500, "busy")})
    with pytest.raises(KubeError):
        PlanExecutor(fake, Recorder(fake), lambda: T0).run(scale_down(), Observed(resource=stored()))
    assert ("apply", "Deployment") not in fake.calls


def test_no_cost_is_written_for_a_scale_down_that_is_held() -> None:
    fake = Fake()
    work = PlanExecutor(fake, Recorder(fake), lambda: T0)
    for _ in range(FREE_RESTORES + 5):
        work.run(scale_down(), Observed(resource=stored()))
    assert [name for name, _ in fake.calls].count("annotate") == FREE_RESTORES
    assert not work.is_due(scale_down(), Observed(resource=stored())), "so no load is read either"


def test_another_operator_that_applies_its_own_version_is_held_and_reported() -> None:
    fake = Fake()
    work = PlanExecutor(fake, Recorder(fake), lambda: T0)
    apply = Apply(DEPLOYMENT, manifest(), "updated to the new spec")
    theirs = {"metadata": {**manifest("theirs")["metadata"], "resourceVersion": "1"}}
    seen = Observed(resource=stored()).with_child(DEPLOYMENT, theirs)
    problems = [work.run(Plan(applies=(apply,)), seen)[1] for _ in range(FREE_RESTORES + 5)]
    # The first write is an upgrade for all that this operator knows.
    assert [name for name, _ in fake.calls].count("apply") == FREE_RESTORES + 1
    problem = problems[-1]
    assert problem is not None
    assert problem.reason == "Contended"
    assert "keeps changing metadata.annotations[fastgen.dev/applied] of Deployment chat" in problem.message


def test_a_child_that_is_deleted_again_and_again_is_held_and_reported() -> None:
    fake = Fake()
    work = PlanExecutor(fake, Recorder(fake), lambda: T0)
    plan = Plan(applies=(Apply(DEPLOYMENT, manifest(), "created"),))
    problem = [work.run(plan, Observed(resource=stored()))[1] for _ in range(FREE_RESTORES + 5)][-1]
    assert [name for name, _ in fake.calls].count("apply") == FREE_RESTORES + 1
    assert problem is not None
    assert "another writer keeps deleting Deployment chat" in problem.message
    assert "to find the other writer, look for a controller or policy that cleans up" in problem.message
    assert "managed-fields" not in problem.message


@dataclass
class Rewriting(Fake):
    """A client of an API server with a mutating webhook that replaces the fingerprint."""

    def apply(self, kind: Kind, manifest: Object, _: Object | None) -> Object:
        self._call("apply", kind.name)
        annotations = {"fastgen.dev/applied": "that of the webhook"}
        return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations, "resourceVersion": "1"}}


def test_a_fingerprint_that_a_webhook_rewrites_is_reported_at_once_and_not_written_for_ever() -> None:
    fake = Rewriting()
    work = PlanExecutor(fake, Recorder(fake), lambda: T0)
    wanted = {**manifest(), "spec": {"replicas": 2}}
    seen = Observed(resource=stored()).with_child(DEPLOYMENT, fake.apply(DEPLOYMENT, wanted, None))
    costs = (SetDeletionCost(Pod(pod()), "7"),)
    plan = Plan(costs, (Apply(DEPLOYMENT, wanted, "restored: spec.replicas had been changed", "spec.replicas"),))
    problem = work.run(plan, seen)[1]
    assert problem is not None
    assert problem.reason == "Contended"
    assert "rewrites metadata.annotations[fastgen.dev/applied] of Deployment chat in every write" in problem.message
    assert "mutatingwebhookconfigurations" in problem.message
    assert "mutatingadmissionpolicies" in problem.message
    for _ in range(FREE_RESTORES + 5):
        work.run(plan, seen)
    assert [name for name, _ in fake.calls].count("annotate") == FREE_RESTORES
