"""A reconcile that fails at any write, before or after the server committed it, converges to the same state."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from fastgen_operator.autoscale.watchlist import Watchlist
from fastgen_operator.children import Platform
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, Key, Kind, Object
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.metrics import Metrics
from fastgen_operator.reconcile import reconciler as reconciler_module
from fastgen_operator.reconcile.reconciler import Reconciler
from harness.objects import applied, deployment, stored

KEY = ("space", "chat")


@dataclass
class FakeCluster:
    """A minimal API server: objects, versions, conflicts, and a fault at the n-th write."""

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    creations: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    writes: int = 0
    fault_at: int | None = None
    fault: KubeError = field(default_factory=lambda: KubeError(500, "etcdserver: request timed out"))
    commits_first: bool = False

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        del namespace
        return copy.deepcopy(self.objects.get((kind.name, name)))

    def owned(self, kind: Kind, key: Key) -> list[Object]:
        del key
        return [copy.deepcopy(child) for (name, _), child in self.objects.items() if name == kind.name]

    def apply(self, kind: Kind, manifest: Object) -> Object:
        def commit() -> Object:
            place = kind.name, manifest["metadata"]["name"]
            old = self.objects.get(place)
            if old is None:
                self.creations.append(kind.name)
            version = int(old["metadata"]["resourceVersion"]) + 1 if old else 1
            generation = {"uid": f"uid-of-{kind.name}", "generation": version, "resourceVersion": str(version)}
            self.objects[place] = applied(manifest, **generation)
            return copy.deepcopy(self.objects[place])

        return self._write(commit)

    def delete(self, kind: Kind, child: Object) -> None:
        def commit() -> Object:
            return self.objects.pop((kind.name, child["metadata"]["name"]))

        self._write(commit)

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object | None:
        if (FASTGEN.name, "chat") not in self.objects:
            return None

        def commit() -> Object:
            live = self.objects[FASTGEN.name, "chat"]
            if live["metadata"]["resourceVersion"] != resource["metadata"]["resourceVersion"]:
                raise KubeError(409, "the object has been modified")
            version = str(int(live["metadata"]["resourceVersion"]) + 1)
            live["metadata"]["resourceVersion"] = version
            live["status"] = copy.deepcopy(status)
            return copy.deepcopy(live)

        return self._write(commit)

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        def commit() -> Object:
            live = self.objects[kind.name, obj["metadata"]["name"]]
            live["metadata"].setdefault("annotations", {}).update(annotations)
            return copy.deepcopy(live)

        return self._write(commit)

    def create_event(self, resource: Object, event: dict[str, Any]) -> str:
        del resource

        def commit() -> Object:
            self.events.append(event["reason"])
            return event

        self._write(commit)
        return f"event-{len(self.events)}"

    def count_event(self, resource: Object, name: str, count: int, time: str) -> None:
        del resource

        def commit() -> Object:
            return {"name": name, "count": count, "lastTimestamp": time}

        self._write(commit)

    def _write(self, commit: Any) -> Object:
        self.writes += 1
        if self.writes == self.fault_at:
            if self.commits_first:
                commit()
            raise self.fault
        done: Object = commit()
        return done


CREATED = ["ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment"]


def no_loads(pods: Sequence[Object], model_name: str) -> dict[str, float]:
    del pods, model_name
    return {}


def _same(now: datetime) -> datetime:
    return now


def reconciler_of(cluster: FakeCluster, now: datetime, client: FakeCluster | None = None) -> Reconciler:
    cache: Any = cluster
    writes: Any = client or cluster
    return Reconciler(
        cache, writes, Metrics(), lambda: Platform("engine:test"), Watchlist(5.0), partial(_same, now), no_loads
    )


def reconcile(cluster: FakeCluster, times: int, client: FakeCluster | None = None) -> None:
    for minute in range(times):
        now = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
        with contextlib.suppress(KubeError):
            reconciler_of(cluster, now, client).reconcile(KEY)


def a_cluster(**fields: Any) -> FakeCluster:
    return FakeCluster(objects={(FASTGEN.name, "chat"): stored()}, **fields)


def end_of(cluster: FakeCluster) -> dict[str, Any]:
    status = cluster.objects[FASTGEN.name, "chat"]["status"]
    conditions = [{**c, "lastTransitionTime": ""} for c in status["conditions"]]
    children = {kind: {**cluster.objects[kind, "chat"], "metadata": {}} for kind in CREATED}
    return {**children, "status": {**status, "conditions": conditions}}


def reference() -> FakeCluster:
    cluster = a_cluster()
    reconcile(cluster, 3)
    return cluster


def test_the_steady_state_has_no_write() -> None:
    cluster = reference()
    writes = cluster.writes
    reconcile(cluster, 3)
    assert cluster.writes == writes


@pytest.mark.parametrize("commits_first", [False, True], ids=["lost", "committed"])
@pytest.mark.parametrize("fault_at", range(1, reference().writes + 1))
def test_a_reconcile_that_fails_at_any_write_converges(fault_at: int, commits_first: bool) -> None:
    cluster = a_cluster(fault_at=fault_at, commits_first=commits_first)
    reconcile(cluster, 4)
    assert cluster.writes >= fault_at
    assert end_of(cluster) == end_of(reference())
    assert sorted(cluster.creations) == sorted(CREATED), "each once; a failed child does not stop the others"
    writes = cluster.writes
    reconcile(cluster, 1)
    assert cluster.writes == writes


def test_a_rejected_event_does_not_stop_the_reconcile() -> None:
    cluster = a_cluster(fault_at=2, fault=KubeError(403, "events is forbidden"))
    reconcile(cluster, 1)
    assert cluster.creations == CREATED
    assert "status" in cluster.objects[FASTGEN.name, "chat"]


def test_a_rejected_deployment_is_in_the_status_and_the_reconcile_is_retried() -> None:
    # Each child before it is a write and an Event.
    cluster = a_cluster(fault_at=2 * CREATED.index("Deployment") + 1, fault=KubeError(403, "exceeded quota: tight"))
    problem = reconciler_of(cluster, datetime.now(UTC)).reconcile(KEY)
    assert problem is not None
    assert problem.message == "the Deployment was refused: exceeded quota: tight"
    ready = cluster.objects[FASTGEN.name, "chat"]["status"]["conditions"][0]
    assert (ready["status"], ready["reason"], ready["message"]) == ("False", "ApplyRefused", problem.message)


def test_a_defect_of_the_operator_is_in_the_status_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_cluster()
    reconcile(cluster, 1)
    monkeypatch.setattr(reconciler_module, "make_plan", lambda *_: 1 / 0)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    subject = reconciler_of(cluster, start)
    for seconds in (0, 2, 4, 8):
        subject.now = partial(_same, start + timedelta(seconds=seconds))
        writes = cluster.writes
        with pytest.raises(ZeroDivisionError):
            subject.reconcile(KEY)
        # One status and one Event, once.
        assert cluster.writes - writes == (2 if seconds == 4 else 0), seconds
    ready = cluster.objects[FASTGEN.name, "chat"]["status"]["conditions"][0]
    assert (ready["status"], ready["reason"]) == ("False", "ReconcileFailed")
    assert ready["message"] == "ZeroDivisionError: division by zero; the operator retries"


def test_in_a_namespace_that_is_being_deleted_nothing_is_retried_or_reported() -> None:
    refusal = KubeError(403, "it is being terminated", causes=("NamespaceTerminating",))
    cluster = a_cluster(fault_at=1, fault=refusal)
    assert reconciler_of(cluster, datetime.now(UTC)).reconcile(KEY) is None
    assert (cluster.writes, cluster.creations, cluster.events) == (1, [], [])
    assert "status" not in cluster.objects[FASTGEN.name, "chat"]


def test_a_resource_that_is_gone_or_being_deleted_needs_nothing() -> None:
    gone, leaving = FakeCluster(), a_cluster()
    leaving.objects[FASTGEN.name, "chat"]["metadata"]["deletionTimestamp"] = "now"
    reconcile(gone, 1)
    reconcile(leaving, 1)
    assert (gone.writes, leaving.writes) == (0, 0)


@pytest.mark.parametrize(
    "live", [None, {"uid": "another"}, {"deletionTimestamp": "now"}], ids=["gone", "recreated", "being deleted"]
)
def test_no_child_is_created_for_a_resource_that_only_the_cache_still_holds(live: Object | None) -> None:
    """Watches are not synchronised: the deletion of a child may arrive before that of its owner, which caused it."""
    known = stored()
    changed = {} if live is None else {(FASTGEN.name, "chat"): {**known, "metadata": {**known["metadata"], **live}}}
    server = FakeCluster(objects=changed)
    reconcile(a_cluster(), 1, client=server)
    assert server.writes == 0


def test_an_autoscaled_deployment_without_its_label_keeps_its_replicas() -> None:
    """The cache does not contain it, so its replicas are known only after a lookup by name."""
    owner = stored(autoscaling={"minReplicas": 1, "maxReplicas": 8})
    live = deployment(owner)
    live["spec"]["replicas"] = 4
    known = {(FASTGEN.name, "chat"): owner}
    server = FakeCluster(objects={**known, (DEPLOYMENT.name, "chat"): live})
    reconcile(FakeCluster(objects=known), 1, client=server)
    assert server.objects[DEPLOYMENT.name, "chat"]["spec"]["replicas"] == 4
    assert server.objects[FASTGEN.name, "chat"]["status"]["desiredReplicas"] == 4
