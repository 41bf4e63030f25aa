"""A reconcile that fails at any write, before or after the server committed it, converges to the same state."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from fastgen import exit_codes
from fastgen_operator.autoscale.watchlist import Watchlist
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, NODE, POD, POD_DISRUPTION_BUDGET, REPLICA_SET, Key, Kind, Object
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.labels_and_annotations import APPLIED_ANNOTATION, OWNER_LABEL
from fastgen_operator.metrics import Metrics
from fastgen_operator.objects.managed_fields import foreign_entries
from fastgen_operator.objects.pod import Pod
from fastgen_operator.reconcile import reconciler as reconciler_module
from fastgen_operator.reconcile.reconciler import Reconciler
from harness.objects import applied, container, deployment, pod, replica_set, stored

KEY = ("space", "chat")


@dataclass
class FakeCluster:
    """A minimal API server: objects, versions, conflicts, and a fault at the n-th write.

    Attributes:
        refused: names of the kinds that a quota refuses.
        admission: changes each Deployment before it is stored, as a mutating webhook does.
        meanwhile: what happens right before the n-th write.
    """

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    creations: list[str] = field(default_factory=list)
    deletions: list[str] = field(default_factory=list)
    refused: tuple[str, ...] = ()
    admission: Callable[[Object], None] = lambda _: None
    meanwhile: dict[int, Callable[[], None]] = field(default_factory=dict)
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

    def holder(self, resource: Object) -> Key | None:
        del resource
        return None

    def pods(self, key: Key) -> list[Pod]:
        return [Pod(pod) for pod in self.owned(POD, key)]

    def apply(self, kind: Kind, manifest: Object, before: Object | None) -> Object:
        def commit() -> Object:
            place = kind.name, manifest["metadata"]["name"]
            old = self.objects.get(place)
            if version_of(old) != version_of(before):
                raise KubeError(409, "the object has been modified")
            if kind.name in self.refused:
                raise KubeError(403, "exceeded quota: tight")
            if old is None:
                self.creations.append(kind.name)
            version = int(old["metadata"]["resourceVersion"]) + 1 if old else 1
            generation = {"uid": f"uid-of-{kind.name}", "generation": version, "resourceVersion": str(version)}
            new = applied(copy.deepcopy(manifest), **generation, creationTimestamp=BEFORE)
            if old and (others := foreign_entries(old)):
                # Server-side apply keeps what another manager owns.
                new["metadata"]["managedFields"] += others
                new["spec"]["template"]["spec"]["nodeSelector"] = NOWHERE
            if kind == DEPLOYMENT:
                self.admission(new)
            self.objects[place] = new
            return copy.deepcopy(new)

        return self._write(commit)

    def delete(self, kind: Kind, obj: Object) -> bool:
        def commit() -> Object:
            self._unchanged(kind, obj)
            self.deletions.append(obj["metadata"]["name"])
            return self.objects.pop((kind.name, obj["metadata"]["name"]))

        self._write(commit)
        return True

    def replace_managers(self, kind: Kind, live: Object, managed_fields: list[Object]) -> Object:
        def commit() -> Object:
            metadata = self._unchanged(kind, live)["metadata"]
            del metadata["annotations"][APPLIED_ANNOTATION]
            metadata["managedFields"] = managed_fields
            metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
            return copy.deepcopy(self.objects[kind.name, live["metadata"]["name"]])

        return self._write(commit)

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object | None:
        if (FASTGEN.name, "chat") not in self.objects:
            return None

        def commit() -> Object:
            live = self._unchanged(FASTGEN, resource)
            version = str(int(live["metadata"]["resourceVersion"]) + 1)
            live["metadata"]["resourceVersion"] = version
            live["status"] = copy.deepcopy(status)
            return copy.deepcopy(live)

        return self._write(commit)

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        def commit() -> Object:
            live = self._unchanged(kind, obj)
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

    def _unchanged(self, kind: Kind, obj: Object) -> Object:
        """Return the stored object; raise a conflict if it is not the version that was read."""
        live = self.objects[kind.name, obj["metadata"]["name"]]
        if version_of(live) != version_of(obj):
            raise KubeError(409, "the object has been modified")
        return live

    def _write(self, commit: Any) -> Object:
        self.writes += 1
        self.meanwhile.get(self.writes, lambda: None)()
        if self.writes == self.fault_at:
            if self.commits_first:
                commit()
            raise self.fault
        done: Object = commit()
        return done


@dataclass
class Warned(FakeCluster):
    """A cluster in which controllers and the kubelet have recorded these Events."""

    warnings: Sequence[Object] = ()

    def list(self, kind: Kind, namespace: str | None, *, fields: str = "") -> tuple[str, Sequence[Object]]:
        del namespace
        if kind == NODE:
            return "1", []
        uid = fields.removeprefix("involvedObject.uid=")
        return "1", [each for each in self.warnings if each["involvedObject"]["uid"] == uid]


BEFORE = "2025-12-31T00:00:00Z"


def version_of(obj: Object | None) -> tuple[str, str] | None:
    return None if obj is None else (obj["metadata"]["uid"], obj["metadata"]["resourceVersion"])


NOWHERE = {"disk": "none"}
CREATED = ["ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment"]


def no_loads(pods: Sequence[Object], model_name: str) -> dict[str, float]:
    del pods, model_name
    return {}


def _same(now: datetime) -> datetime:
    return now


def reconciler_of(
    cluster: FakeCluster, now: datetime, client: FakeCluster | None = None, operator_class: str | None = None
) -> Reconciler:
    """Return a new operator; one with a class has another image for the engines."""
    cache: Any = cluster
    writes: Any = client or cluster
    platform = Platform(f"engine:{operator_class or 'test'}")
    return Reconciler(
        *(cache, writes, Metrics(), lambda _: platform, Watchlist(5.0), partial(_same, now), no_loads, operator_class)
    )


def reconcile(
    cluster: FakeCluster, times: int, client: FakeCluster | None = None, operator_class: str | None = None
) -> None:
    """Reconcile several times, each time by an operator that was just started."""
    for minute in range(times):
        now = datetime(2026, 1, 1, 0, minute, tzinfo=UTC)
        with contextlib.suppress(KubeError):
            reconciler_of(cluster, now, client, operator_class).reconcile(KEY)


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


def test_a_child_that_fails_does_not_stop_those_after_it() -> None:
    cluster = a_cluster(fault_at=CREATED.index("Service") + 1)
    reconcile(cluster, 1)
    assert cluster.creations == [kind for kind in CREATED if kind != "Service"]


def condition_of(cluster: FakeCluster, kind: str) -> Object:
    conditions = cluster.objects[FASTGEN.name, "chat"]["status"]["conditions"]
    return next((each for each in conditions if each["type"] == kind), {})


def with_a_refused_child() -> FakeCluster:
    return a_cluster(refused=(POD_DISRUPTION_BUDGET.name,))


def check_the_refused_child(cluster: FakeCluster) -> None:
    assert sorted(cluster.creations) == sorted(set(CREATED) - {POD_DISRUPTION_BUDGET.name})
    assert condition_of(cluster, "Ready")["reason"] == "ApplyRefused"


def with_a_webhook() -> FakeCluster:
    def mirror(live: Object) -> None:
        live["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/engine:test"

    return a_cluster(admission=mirror)


def check_the_webhook(cluster: FakeCluster) -> None:
    assert sorted(cluster.creations) == sorted(CREATED)
    found = condition_of(cluster, "TemplateUnmodified")
    assert found["reason"] == "RewrittenByWebhook"
    assert "containers[engine].image: to find it" in found["message"]


def with_a_foreign_field() -> FakeCluster:
    cluster = reference()
    live = cluster.objects[DEPLOYMENT.name, "chat"]
    live["spec"]["template"]["spec"]["nodeSelector"] = NOWHERE
    owned = {"f:spec": {"f:template": {"f:spec": {"f:nodeSelector": {"f:disk": {}}}}}}
    live["metadata"]["managedFields"].append({"manager": "kubectl-edit", "operation": "Update", "fieldsV1": owned})
    return cluster


def check_the_foreign_field(cluster: FakeCluster) -> None:
    assert end_of(cluster) == end_of(reference())
    assert foreign_entries(cluster.objects[DEPLOYMENT.name, "chat"]) == ()


def with_waiting_pods() -> FakeCluster:
    """Two replicas wait for the node of a ReadWriteOnce volume, which the last pod there has just left."""
    cached = {"model": {"source": "hf://tests/tiny"}, "cache": {"size": "1Gi", "preload": False}}
    cluster = FakeCluster(objects={(FASTGEN.name, "chat"): stored(replicas=2, **cached)})
    reconcile(cluster, 3)
    condition_of(cluster, "PodsScheduled").update(status="False", reason="VolumeOnOneNode")
    for name in "ab":
        waiting = pod(name=name, scheduled="0/2 nodes are available: 1 Insufficient nvidia.com/gpu.")
        labels = {**waiting["metadata"]["labels"], OWNER_LABEL: "chat"}
        metadata = {**waiting["metadata"], "namespace": "space", "uid": name, "labels": labels, "resourceVersion": "1"}
        cluster.objects[POD.name, f"chat-new-{name}"] = {**waiting, "metadata": metadata}
    return cluster


def check_the_waiting_pods(cluster: FakeCluster) -> None:
    assert sorted(cluster.deletions) == ["chat-new-a", "chat-new-b"], "each once"
    assert condition_of(cluster, "PodsScheduled")["reason"] == "NoPods"


def warning(reason: str, message: str, uid: str) -> Object:
    time = {"count": 2, "lastTimestamp": BEFORE}
    return {"type": "Warning", "reason": reason, "message": message, "involvedObject": {"uid": uid}, **time}


def with_a_refused_download() -> FakeCluster:
    """A quota refuses the pod of the download Job."""
    cached = {"model": {"source": "hf://tests/tiny"}, "cache": {"size": "1Gi"}}
    refusal = warning("FailedCreate", "Error creating: exceeded quota: tight", "uid-of-Job")
    return Warned(objects={(FASTGEN.name, "chat"): stored(**cached)}, warnings=(refusal,))


def check_the_refused_download(cluster: FakeCluster) -> None:
    first = set(CREATED) - {DEPLOYMENT.name}
    assert Counter(cluster.creations) == Counter([*first, "NetworkPolicy", "PersistentVolumeClaim", "Job"])
    assert condition_of(cluster, "Ready")["reason"] == "FailedCreate"


def with_a_pod(found: Object, *warnings: Object, **spec: Any) -> FakeCluster:
    """Return a cluster in which the only replica is this pod, which the Deployment controller has created."""
    before = FakeCluster(objects={(FASTGEN.name, "chat"): stored(**spec)})
    reconcile(before, 3)
    cluster = Warned(before.objects, before.creations, warnings=warnings)
    live = cluster.objects[DEPLOYMENT.name, "chat"]
    live["status"] = {"observedGeneration": live["metadata"]["generation"], "replicas": 1, "updatedReplicas": 1}
    owned = replica_set("new", live["spec"]["template"])
    owned["metadata"]["ownerReferences"][0]["uid"] = live["metadata"]["uid"]
    cluster.objects[REPLICA_SET.name, "chat-new"] = owned
    found["metadata"] |= {"namespace": "space", "uid": "uid-of-pod", "creationTimestamp": BEFORE}
    found["metadata"]["labels"][OWNER_LABEL] = "chat"
    cluster.objects[POD.name, found["metadata"]["name"]] = found
    return cluster


def with_a_gated_pod() -> FakeCluster:
    found = pod(scheduled="blocked")
    found["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    found["status"]["conditions"][-1]["reason"] = "SchedulingGated"
    return with_a_pod(found)


def with_a_missing_secret() -> FakeCluster:
    return with_a_pod(pod(), warning("FailedMount", 'secret "nope" not found', "uid-of-pod"))


def with_a_hung_engine() -> FakeCluster:
    hung = {"terminated": {"exitCode": exit_codes.HUNG, "reason": "Error", "message": "the engine hangs"}}
    return with_a_pod(pod(**container(restarts=1, state={"running": {}}, lastState=hung)))


def with_a_broken_gpu() -> FakeCluster:
    failed = {"terminated": {"exitCode": exit_codes.DEVICE_FAILED, "reason": "Error", "message": "the GPU failed: Xid"}}
    broken = pod(**container(restarts=1, state={"running": {}}, lastState=failed))
    return with_a_pod(broken, engine={"device": "cuda"}, resources={"gpu": {"count": 1}})


def check_the_broken_gpu(cluster: FakeCluster) -> None:
    assert cluster.deletions == ["chat-new-x"], "once"
    last = cluster.objects[FASTGEN.name, "chat"]["status"]["lastReplacement"]
    assert (last["pod"], last["reason"], last["count"]) == ("chat-new-x", "DeviceFailed", 1)


def check_reason(reason: str, words: str, cluster: FakeCluster) -> None:
    assert sorted(cluster.creations) == sorted(CREATED), "each once"
    found = condition_of(cluster, "Ready")
    assert (found["status"], found["reason"]) == ("False", reason)
    assert words in found["message"]
    assert Counter(cluster.events)[reason] <= 1, "one Event"


SCENARIOS: dict[str, tuple[Callable[[], FakeCluster], Callable[[FakeCluster], None]]] = {
    "a refused download": (with_a_refused_download, check_the_refused_download),
    "a gated pod": (with_a_gated_pod, partial(check_reason, "SchedulingGated", "kueue.x-k8s.io/admission")),
    "a missing Secret": (with_a_missing_secret, partial(check_reason, "FailedMount", 'secret "nope" not found')),
    "a hung engine": (with_a_hung_engine, partial(check_reason, "EngineHung", "the engine hangs")),
    "a broken GPU": (with_a_broken_gpu, check_the_broken_gpu),
    "a refused child": (with_a_refused_child, check_the_refused_child),
    "a webhook that rewrites": (with_a_webhook, check_the_webhook),
    "a foreign field": (with_a_foreign_field, check_the_foreign_field),
    "pods that wait for a volume's node": (with_waiting_pods, check_the_waiting_pods),
}


@pytest.mark.parametrize("commits_first", [False, True], ids=["lost", "committed"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_converges_if_any_of_its_writes_fails(scenario: str, commits_first: bool) -> None:
    start, check = SCENARIOS[scenario]
    undisturbed = start()
    first = undisturbed.writes + 1
    reconcile(undisturbed, 3)
    check(undisturbed)
    last = undisturbed.writes
    assert last > first, "nothing to interrupt"
    for fault_at in range(first, last + 1):
        cluster = start()
        cluster.fault_at, cluster.commits_first = fault_at, commits_first
        reconcile(cluster, 5)
        check(cluster)
        rested = end_of_all(cluster)
        reconcile(cluster, 2)
        assert end_of_all(cluster) == rested, fault_at


def end_of_all(cluster: FakeCluster) -> tuple[Any, ...]:
    """Return the objects, creations and deletions. A refused child is tried again, so writes are not counted."""
    return copy.deepcopy(cluster.objects), tuple(cluster.creations), tuple(cluster.deletions)


def move(cluster: FakeCluster) -> None:
    """Give the resource to the operator of the class blue."""
    live = cluster.objects[FASTGEN.name, "chat"]
    live["spec"]["operatorClass"] = "blue"
    version = str(int(live["metadata"]["resourceVersion"]) + 1)
    live["metadata"].update(generation=live["metadata"]["generation"] + 1, resourceVersion=version)


@pytest.mark.parametrize("moved_at", range(1, reference().writes + 1))
def test_a_class_that_changes_at_any_write_of_the_old_operator_leaves_the_state_of_the_new_one(moved_at: int) -> None:
    expected = a_cluster()
    move(expected)
    reconcile(expected, 3, operator_class="blue")
    cluster = a_cluster()
    cluster.meanwhile[moved_at] = partial(move, cluster)
    for _ in range(3):
        reconcile(cluster, 1)
        reconcile(cluster, 2, operator_class="blue")
    assert end_of(cluster) == end_of(expected)
    assert sorted(cluster.creations) == sorted(CREATED), "each once"
    image = cluster.objects[DEPLOYMENT.name, "chat"]["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "engine:blue"
    writes = cluster.writes
    reconcile(cluster, 2)
    reconcile(cluster, 2, operator_class="blue")
    assert cluster.writes == writes, "neither writes"


@pytest.mark.parametrize("commits_first", [False, True], ids=["lost", "committed"])
def test_a_new_class_converges_if_any_of_its_operators_writes_fails(commits_first: bool) -> None:
    def start() -> FakeCluster:
        cluster = reference()
        move(cluster)
        return cluster

    undisturbed = start()
    first = undisturbed.writes + 1
    reconcile(undisturbed, 3, operator_class="blue")
    assert undisturbed.writes > first
    for fault_at in range(first, undisturbed.writes + 1):
        cluster = start()
        cluster.fault_at, cluster.commits_first = fault_at, commits_first
        for _ in range(4):
            reconcile(cluster, 1, operator_class="blue")
            reconcile(cluster, 1)
        assert end_of(cluster) == end_of(undisturbed), fault_at
        assert sorted(cluster.creations) == sorted(CREATED), "each once"


def test_a_rejected_event_does_not_stop_the_reconcile() -> None:
    # One Event for all new children, after them.
    cluster = a_cluster(fault_at=len(CREATED) + 1, fault=KubeError(403, "events is forbidden"))
    reconcile(cluster, 1)
    assert cluster.creations == CREATED
    assert "status" in cluster.objects[FASTGEN.name, "chat"]


def test_a_rejected_deployment_is_in_the_status_and_the_reconcile_is_retried() -> None:
    cluster = a_cluster(fault_at=CREATED.index("Deployment") + 1, fault=KubeError(403, "exceeded quota: tight"))
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


def test_a_failure_is_reported_although_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_cluster()
    monkeypatch.setattr(reconciler_module, "make_plan", lambda *_: 1 / 0)
    start = datetime(2026, 1, 1, 12, tzinfo=UTC)
    subject = reconciler_of(cluster, start)
    for hours in (0, 8):
        subject.now = partial(_same, start - timedelta(hours=hours))
        with pytest.raises(ZeroDivisionError):
            subject.reconcile(KEY)
    assert condition_of(cluster, "Ready")["reason"] == "ReconcileFailed"


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
