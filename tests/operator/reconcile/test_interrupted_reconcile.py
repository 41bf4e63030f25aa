"""A visit that dies at any of its writes, before or after the server took it, converges to the same end."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from fastgen_operator.autoscale.watchlist import Watchlist
from fastgen_operator.children import Platform
from fastgen_operator.kinds import FASTGEN, Key, Kind, Object
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.metrics import Metrics
from fastgen_operator.reconcile.reconciler import Reconciler
from harness.objects import stored

KEY = ("space", "chat")


@dataclass
class FakeCluster:
    """Just enough of an API server: objects, versions, conflicts, and a fault at the n-th write."""

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    creations: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    writes: int = 0
    fault_at: int | None = None
    fault: KubeError = field(default_factory=lambda: KubeError(500, "etcdserver: request timed out"))
    takes_it_first: bool = False

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        del namespace
        return copy.deepcopy(self.objects.get((kind.name, name)))

    look = get

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
            self.objects[place] = {**manifest, "metadata": {**manifest["metadata"], **generation}}
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
            if self.takes_it_first:
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


def visit(cluster: FakeCluster, times: int) -> None:
    for minute in range(times):
        now = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
        reconciler = Reconciler(
            cluster, Metrics(), lambda: Platform("engine:test"), Watchlist(5.0), partial(_same, now), no_loads
        )
        with contextlib.suppress(KubeError):
            reconciler.reconcile(KEY)


def a_cluster(**fields: Any) -> FakeCluster:
    return FakeCluster(objects={(FASTGEN.name, "chat"): stored()}, **fields)


def end_of(cluster: FakeCluster) -> dict[str, Any]:
    status = cluster.objects[FASTGEN.name, "chat"]["status"]
    conditions = [{**c, "lastTransitionTime": ""} for c in status["conditions"]]
    children = {kind: {**cluster.objects[kind, "chat"], "metadata": {}} for kind in CREATED}
    return {**children, "status": {**status, "conditions": conditions}}


def reference() -> FakeCluster:
    cluster = a_cluster()
    visit(cluster, 3)
    return cluster


def test_the_steady_state_has_no_write() -> None:
    cluster = reference()
    writes = cluster.writes
    visit(cluster, 3)
    assert cluster.writes == writes


@pytest.mark.parametrize("takes_it_first", [False, True], ids=["lost", "taken"])
@pytest.mark.parametrize("fault_at", range(1, reference().writes + 1))
def test_a_visit_that_dies_at_any_write_converges(fault_at: int, takes_it_first: bool) -> None:
    cluster = a_cluster(fault_at=fault_at, takes_it_first=takes_it_first)
    visit(cluster, 4)
    assert cluster.writes >= fault_at
    assert end_of(cluster) == end_of(reference())
    assert cluster.creations == CREATED
    writes = cluster.writes
    visit(cluster, 1)
    assert cluster.writes == writes


def test_a_refused_event_does_not_stop_the_visit() -> None:
    cluster = a_cluster(fault_at=2, fault=KubeError(403, "events is forbidden"))
    visit(cluster, 1)
    assert cluster.creations == CREATED
    assert "status" in cluster.objects[FASTGEN.name, "chat"]


def test_a_refused_deployment_is_in_the_status_and_the_visit_is_repeated() -> None:
    # Each child before it is a write and an Event.
    cluster = a_cluster(fault_at=2 * CREATED.index("Deployment") + 1, fault=KubeError(403, "exceeded quota: tight"))
    reconciler = Reconciler(
        cluster, Metrics(), lambda: Platform("e"), Watchlist(5.0), lambda: datetime.now(UTC), no_loads
    )
    problem = reconciler.reconcile(KEY)
    assert problem is not None
    assert problem.message == "the Deployment was refused: exceeded quota: tight"
    ready = cluster.objects[FASTGEN.name, "chat"]["status"]["conditions"][0]
    assert (ready["status"], ready["reason"], ready["message"]) == ("False", "ApplyRefused", problem.message)


def test_in_a_namespace_that_is_being_deleted_nothing_is_tried_again_and_nothing_said() -> None:
    refusal = KubeError(403, "it is being terminated", causes=("NamespaceTerminating",))
    cluster = a_cluster(fault_at=1, fault=refusal)
    now = datetime.now(UTC)
    reconciler = Reconciler(cluster, Metrics(), lambda: Platform("e"), Watchlist(5.0), partial(_same, now), no_loads)
    assert reconciler.reconcile(KEY) is None
    assert (cluster.writes, cluster.creations, cluster.events) == (1, [], [])
    assert "status" not in cluster.objects[FASTGEN.name, "chat"]


def test_a_resource_that_is_gone_or_leaving_needs_nothing() -> None:
    gone, leaving = FakeCluster(), a_cluster()
    leaving.objects[FASTGEN.name, "chat"]["metadata"]["deletionTimestamp"] = "now"
    visit(gone, 1)
    visit(leaving, 1)
    assert (gone.writes, leaving.writes) == (0, 0)


@dataclass
class Remembered(FakeCluster):
    """A cluster whose memory still has the resource as it was; the API server has `live` instead."""

    live: Object | None = None

    def look(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self.live if kind == FASTGEN else super().look(kind, namespace, name)


@pytest.mark.parametrize(
    "live", [None, {"uid": "another"}, {"deletionTimestamp": "now"}], ids=["gone", "new", "leaving"]
)
def test_no_child_is_made_for_a_resource_of_whose_end_only_its_children_have_told(live: Object | None) -> None:
    """Watches do not keep step: the end of a child is often heard of before that of its owner, which caused it."""
    known = stored()
    changed = None if live is None else {**known, "metadata": {**known["metadata"], **live}}
    cluster = Remembered(objects={(FASTGEN.name, "chat"): known}, live=changed)
    visit(cluster, 1)
    assert cluster.writes == 0
