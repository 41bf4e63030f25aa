"""A Ready resource of which nothing has changed is not planned again; any change, and time, end that."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastgen_operator.autoscale.decision import Decision, Sizing
from fastgen_operator.autoscale.measure.capacity import MeasuredCapacity, ReplicaSpeeds, Straggler
from fastgen_operator.autoscale.scrape.served_model import ServedModel
from fastgen_operator.autoscale.supply import LoadingStage
from fastgen_operator.autoscale.watchlist import Record, Watchlist
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, POD, POD_MONITOR, REPLICA_SET, SERVICE, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.metrics import Metrics
from fastgen_operator.plan.plan import Plan, make_plan
from fastgen_operator.reconcile import reconciler as reconciler_module
from fastgen_operator.reconcile.reconciler import Reconciler
from fastgen_operator.reconcile.settled import TRUST, Inputs, Settled
from fastgen_operator.runtime.informers import deliver
from fastgen_operator.runtime.workqueue import WorkQueue
from harness.objects import applied, replica_set, stored
from harness.space import NOW, running
from harness.webhook import mirror_image

KEY = ("space", "chat")


@dataclass
class World:
    """A cache, a client that writes into it, and a reconciler.

    Attributes:
        unlabelled: objects that no watch shows.
        admission: changes each Deployment before it is stored, as a mutating webhook does.
    """

    cache: InformerCache = field(default_factory=InformerCache)
    watchlist: Watchlist = field(default_factory=lambda: Watchlist(5.0))
    platform: Platform = field(default_factory=lambda: Platform("engine:test"))
    now: datetime = datetime(2026, 1, 1, 12, tzinfo=UTC)
    unlabelled: dict[tuple[Kind, str], Object] = field(default_factory=dict)
    admission: Callable[[Object], None] = lambda _: None
    writes: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        client: Any = self
        self.reconciler = Reconciler(
            *(self.cache, client, Metrics(), lambda _: self.platform, self.watchlist, lambda: self.now),
            lambda *_: {},
        )

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self.cache.get(kind, namespace, name) or self.unlabelled.get((kind, name))

    def apply(self, kind: Kind, manifest: Object, _: Object | None) -> Object:
        self.writes += 1
        metadata = {"uid": f"uid-of-{kind.name.lower()}", "generation": 7, "creationTimestamp": "2026-01-01T00:00:00Z"}
        new = applied(copy.deepcopy(manifest), **metadata)
        if kind == DEPLOYMENT:
            self.admission(new)
        return self.put(kind, new)

    def patch_status(self, resource: Object, status: Object) -> Object:
        self.writes += 1
        return self.put(FASTGEN, {**resource, "status": status})

    def create_event(self, *_: object) -> str:
        return "event"

    def count_event(self, *_: object) -> None:
        pass

    def put(self, kind: Kind, obj: Object) -> Object:
        self.version += 1
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        self.cache.put(kind, stored)
        return stored

    def edit(self, kind: Kind, name: str, **metadata: Any) -> None:
        """Store a new version of an object."""
        live = self.cache.get(kind, "space", name)
        assert live is not None
        self.put(kind, {**copy.deepcopy(live), "metadata": {**live["metadata"], **metadata}})

    def remove(self, kind: Kind, name: str) -> None:
        live = self.cache.get(kind, "space", name)
        assert live is not None
        self.version += 1
        self.cache.remove(kind, {**live, "metadata": {**live["metadata"], "resourceVersion": str(self.version)}})

    def settle(self) -> None:
        """Reconcile until nothing is written."""
        written = -1
        while self.writes > written:
            written = self.writes
            self.reconciler.reconcile(KEY)


def serving(world: World | None = None, **spec: Any) -> World:
    """Return the world of a resource that serves with one pod, reconciled until nothing is written."""
    world = world or World()
    world.put(FASTGEN, stored(**spec))
    world.reconciler.reconcile(KEY)
    live = world.cache.get(DEPLOYMENT, *KEY)
    assert live is not None
    conditions = [{"type": "Available", "status": "True"}]
    counts = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}
    world.put(DEPLOYMENT, {**live, "status": {"observedGeneration": 7, **counts, "conditions": conditions}})
    owned = replica_set("new", live["spec"]["template"])
    labels = {**owned["spec"]["template"]["metadata"]["labels"], OWNER_LABEL: "chat"}
    place = {"namespace": "space", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels}
    world.put(REPLICA_SET, {**owned, "metadata": {**owned["metadata"], **place}})
    pod = {**live["spec"]["template"], "metadata": {**place, "name": "chat-new-x"}, "status": running(ready=True)}
    world.put(POD, {**pod, "spec": {**pod["spec"], "nodeName": "n"}})
    world.settle()
    return world


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """All plans that were made."""
    made: list[Plan] = []

    def counted(*args: Any) -> Plan:
        made.append(make_plan(*args))
        return made[-1]

    monkeypatch.setattr(reconciler_module, "make_plan", counted)
    return made


def test_a_ready_resource_without_a_change_is_not_planned_again(plans: list[Plan]) -> None:
    world = serving()
    plans.clear()

    def counted(name: str) -> float:
        return world.reconciler.metrics.registry.get_sample_value(f"fastgen_operator_{name}") or 0

    reconciles = counted("reconcile_seconds_count")
    assert reconciles > 0
    skipped = counted("skipped_reconciles_total")
    for _ in range(3):
        world.now += timedelta(seconds=30)
        world.reconciler.reconcile(KEY)
        assert world.reconciler.unsettled([KEY]) == []
    assert plans == []
    assert counted("skipped_reconciles_total") == skipped + 6, "an alert watches that reconciles or checks go on"
    assert counted("reconcile_seconds_count") == reconciles, "checks would hide how long reconciles take"


def test_a_ready_resource_that_a_webhook_rewrites_is_not_planned_again(plans: list[Plan]) -> None:
    """A policy for all Deployments, such as a registry mirror, must not make every resource expensive."""
    world = serving(World(admission=mirror_image))
    live = world.cache.get(FASTGEN, *KEY)
    assert live is not None
    assert live["status"]["conditions"][-1]["reason"] == "RewrittenByWebhook"
    plans.clear()
    world.reconciler.reconcile(KEY)
    assert plans == []


def record_of(world: World) -> Record:
    record = world.watchlist.open_record(KEY, dict(world.watchlist.subjects())[KEY])
    assert record is not None
    return record


def decide(world: World, decision: Decision) -> None:
    record_of(world).decision = decision


def measure(world: World, tokens: float | None, *stragglers: Straggler) -> None:
    record = record_of(world)
    capacity = None if tokens is None else MeasuredCapacity(tokens, 512, "StepModel")
    speeds = ReplicaSpeeds(capacity=capacity, stragglers=stragglers)
    record.state = replace(record.state, speeds=speeds)


def serve_model(world: World, said: dict[str, Any]) -> None:
    world.watchlist.set_served_model(KEY, dict(world.watchlist.subjects())[KEY], ServedModel("new", said))


CHANGES: dict[str, Callable[[World], object]] = {
    "the resource": lambda world: world.edit(FASTGEN, "chat", labels={"a": "b"}),
    "a child": lambda world: world.edit(SERVICE, "chat", annotations={}),
    "a pod": lambda world: world.edit(POD, "chat-new-x", annotations={"a": "b"}),
    "a ReplicaSet": lambda world: world.edit(REPLICA_SET, "chat-new", annotations={"a": "b"}),
    "a deleted child": lambda world: world.remove(SERVICE, "chat"),
    "a deleted pod": lambda world: world.remove(POD, "chat-new-x"),
    "the platform": lambda world: setattr(world, "platform", replace(world.platform)),
    "the autoscaler's decision": lambda world: decide(world, Decision(2)),
    "another demand": lambda world: setattr(record_of(world), "told", 100.0),
    "a demand that the status does not show": lambda world: decide(world, Decision(1, sizing=Sizing(9, 9, 1, 0))),
    "the state of a pod": lambda world: setattr(record_of(world), "states", (("chat-new-x", "Lost"),)),
    "a capacity that was unknown": lambda world: measure(world, 100.0),
    "a straggler": lambda world: measure(world, None, Straggler("chat-new-x", 0.3)),
    "what an engine serves": lambda world: serve_model(world, {"family": "llama"}),
    "time": lambda world: setattr(world, "now", world.now + TRUST),
    "a clock that was set back": lambda world: setattr(world, "now", world.now - timedelta(days=1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_planned(change: str, plans: list[Plan]) -> None:
    world = serving(autoscaling={"maxReplicas": 3})
    decide(world, Decision(1))
    world.settle()
    plans.clear()
    world.reconciler.reconcile(KEY)
    assert plans == []
    CHANGES[change](world)
    assert world.reconciler.unsettled([KEY]) == [KEY]
    world.reconciler.reconcile(KEY)
    assert len(plans) >= 1


def test_another_holder_of_the_models_name_at_the_gateway_is_planned(plans: list[Plan]) -> None:
    world = serving(gateway={"expose": True})
    plans.clear()
    world.reconciler.reconcile(KEY)
    assert plans == []
    # It was created at the same time, and its name comes first.
    world.put(FASTGEN, stored("a", model={"source": "file:///m", "servedName": "chat"}, gateway={"expose": True}))
    assert world.reconciler.unsettled([KEY]) == [KEY]
    world.reconciler.reconcile(KEY)
    assert len(plans) >= 1


def test_the_start_of_a_schedule_is_due_and_planned_and_so_is_its_end(plans: list[Plan]) -> None:
    at_noon = {"name": "noon", "start": "5 12 * * *", "durationSeconds": 600, "minReplicas": 2}
    world = serving(autoscaling={"maxReplicas": 3, "schedules": [at_noon]})
    decide(world, Decision(1))
    world.settle()
    assert world.reconciler.seconds_until_due(KEY) == 300

    def replicas() -> int:
        live = world.cache.get(DEPLOYMENT, *KEY)
        assert live is not None
        return int(live["spec"]["replicas"])

    plans.clear()
    world.now += timedelta(seconds=299)
    world.reconciler.reconcile(KEY)
    assert (plans, replicas(), world.reconciler.seconds_until_due(KEY)) == ([], 1, 1)
    world.now += timedelta(seconds=1)
    world.reconciler.reconcile(KEY)
    assert replicas() == 2
    assert world.reconciler.seconds_until_due(KEY) == 600
    resource = world.cache.get(FASTGEN, *KEY)
    assert resource is not None
    until = "2026-01-01T12:15:00+00:00"
    assert resource["status"]["autoscaling"]["activeSchedule"] == {"name": "noon", "minReplicas": 2, "until": until}
    # The autoscaler's loop follows with decisions of its own, and removes the replica after the end.
    floor = dict(world.watchlist.subjects())[KEY].floor
    assert floor is not None
    assert floor.replicas == 2
    world.now += timedelta(seconds=600)
    world.reconciler.reconcile(KEY)
    assert dict(world.watchlist.subjects())[KEY].floor is None
    assert world.reconciler.seconds_until_due(KEY) == 86_400 - 600


def test_a_time_that_is_due_is_not_due_again_if_the_spec_cannot_be_read() -> None:
    """Otherwise the resource would be reconciled without a pause."""
    at_noon = {"name": "noon", "start": "5 12 * * *", "durationSeconds": 600, "minReplicas": 2}
    world = serving(autoscaling={"maxReplicas": 3, "schedules": [at_noon]})
    live = world.cache.get(FASTGEN, *KEY)
    assert live is not None
    world.put(FASTGEN, {**live, "spec": {**live["spec"], "engine": {"device": "tpu"}}})
    world.now += timedelta(seconds=300)
    world.reconciler.reconcile(KEY)
    assert world.reconciler.seconds_until_due(KEY) is None


def test_an_invalid_schedule_is_reported_and_the_rest_is_applied() -> None:
    impossible = {"name": "never", "start": "0 0 30 2 *", "durationSeconds": 600, "minReplicas": 2}
    world = World()
    world.put(FASTGEN, stored(autoscaling={"maxReplicas": 3, "schedules": [impossible]}))
    problem = world.reconciler.reconcile(KEY)
    assert problem is not None
    assert problem.reason == "InvalidSchedule"
    assert problem.message.startswith("spec.autoscaling.schedules[0].start: '0 0 30 2 *'")
    assert world.cache.get(DEPLOYMENT, *KEY) is not None
    live = world.cache.get(FASTGEN, *KEY)
    assert live is not None
    reasons = {each["type"]: each["reason"] for each in live["status"]["conditions"]}
    assert reasons["Progressing"] == "InvalidSchedule"


def test_another_estimate_of_the_capacity_alone_is_not_planned(plans: list[Plan]) -> None:
    world = serving(autoscaling={"maxReplicas": 3})
    decide(world, Decision(1, sizing=Sizing(50.0, 100.0, 0.85, 0.0)))
    measure(world, 100.0)
    world.settle()
    plans.clear()
    decide(world, Decision(1, sizing=Sizing(60.0, 101.0, 0.85, 0.0)))
    measure(world, 101.0)
    world.reconciler.reconcile(KEY)
    assert plans == []


def test_a_resource_that_is_not_ready_is_planned_every_time(plans: list[Plan]) -> None:
    """Its status may depend on the time: a crash counts for ten minutes."""
    world = serving()
    world.remove(POD, "chat-new-x")
    world.settle()
    plans.clear()
    for _ in range(3):
        world.reconciler.reconcile(KEY)
    assert len(plans) == 3


def test_a_ready_resource_with_a_pod_that_is_not_ready_is_planned_every_time(plans: list[Plan]) -> None:
    """A pod that is starting becomes overdue without an event."""
    world = serving(autoscaling={"maxReplicas": 3})
    decide(world, Decision(1))
    pod = world.cache.get(POD, "space", "chat-new-x")
    assert pod is not None
    world.put(POD, {**pod, "metadata": {**pod["metadata"], "name": "chat-new-y"}, "status": running(ready=False)})
    world.settle()
    live = world.cache.get(FASTGEN, *KEY)
    assert live is not None
    assert {"Ready": "True"}.items() <= {each["type"]: each["status"] for each in live["status"]["conditions"]}.items()
    plans.clear()
    for _ in range(3):
        world.reconciler.reconcile(KEY)
    assert len(plans) == 3


def test_what_a_loading_engine_says_is_one_write() -> None:
    world = serving()
    ready = world.cache.get(POD, "space", "chat-new-x")
    assert ready is not None
    world.put(POD, {**ready, "status": {**running(ready=False), "podIP": "10.0.0.3"}})
    world.settle()
    loading = dict(world.watchlist.subjects())[KEY].loading
    assert loading is not None
    assert loading.address == "10.0.0.3"
    written = world.writes
    assert world.watchlist.set_loading_stage(KEY, LoadingStage("chat-new-x", NOW, "loading weights 40 %"))
    world.settle()
    assert world.writes == written + 1
    live = world.cache.get(FASTGEN, *KEY)
    assert live is not None
    words = f"0 of 1 replicas ready; pod chat-new-x: the engine has been loading since {NOW}: loading weights 40 %"
    assert live["status"]["conditions"][0]["message"] == words
    world.put(POD, ready)
    world.settle()
    assert dict(world.watchlist.subjects())[KEY].loading is None


def test_an_object_that_only_a_request_finds_is_looked_up_every_time() -> None:
    """Another owner's PodMonitor takes the place of the resource's own, and no watch shows its end."""
    theirs = {"metadata": {"name": "chat", "namespace": "space", "resourceVersion": "1", "uid": "theirs"}}
    platform = Platform("engine:test", optional_kinds=frozenset({POD_MONITOR}))
    world = serving(World(platform=platform, unlabelled={(POD_MONITOR, "chat"): theirs}))
    live = world.cache.get(FASTGEN, *KEY)
    assert live is not None
    assert live["status"]["conditions"][0]["status"] == "True"
    assert world.cache.get(POD_MONITOR, *KEY) is None
    del world.unlabelled[POD_MONITOR, "chat"]
    world.reconciler.reconcile(KEY)
    assert world.cache.get(POD_MONITOR, *KEY) is not None


async def test_a_change_that_arrives_right_after_the_decision_to_skip_is_planned(
    plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch's event finds the key in process, and queues it again."""
    world = serving()
    queue = WorkQueue(first=1, limit=1, jitter=lambda: 0.0, clock=lambda: 0.0)
    loop, decide = asyncio.get_running_loop(), Settled.is_settled
    decided: list[bool] = []

    def is_settled(self: Settled, inputs: Inputs, now: datetime) -> bool:
        decided.append(decide(self, inputs, now))
        if len(decided) == 1:
            asyncio.run_coroutine_threadsafe(change(), loop).result(60)
        return decided[-1]

    async def change() -> None:
        live = world.cache.get(SERVICE, *KEY)
        assert live is not None
        changed = {**live, "metadata": {**live["metadata"], "resourceVersion": "1000", "annotations": {}}}
        deliver(SERVICE, "MODIFIED", changed, world.cache, queue)

    monkeypatch.setattr(Settled, "is_settled", is_settled)
    plans.clear()
    queue.add(KEY)
    for _ in range(2):
        key = await asyncio.wait_for(queue.take(), 60)
        await asyncio.to_thread(world.reconciler.reconcile, key)
        queue.done(key)
    assert decided == [True, False]
    assert [apply.kind for apply in plans[0].applies] == [SERVICE]


def test_the_recommendation_of_a_dry_run_is_not_carried_out_when_the_dry_run_ends() -> None:
    world = serving(replicas=1, autoscaling={"maxReplicas": 4, "mode": "DryRun"})
    decide(world, Decision(3))
    world.settle()
    live = world.cache.get(FASTGEN, *KEY)
    assert live is not None
    world.put(FASTGEN, {**live, "spec": {**stored(autoscaling={"maxReplicas": 4})["spec"]}})
    world.reconciler.reconcile(KEY)
    deployment = world.cache.get(DEPLOYMENT, *KEY)
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 1, "the autoscaler starts from the number that runs"


def test_the_replicas_are_held_while_those_that_exist_cannot_be_counted() -> None:
    world = serving(replicas=None, autoscaling={"minReplicas": 1, "maxReplicas": 5})
    decide(world, Decision(3))
    world.reconciler.is_stale = lambda namespace: namespace == "space"
    world.reconciler.reconcile(KEY)
    deployment = world.cache.get(DEPLOYMENT, *KEY)
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 1
    world.reconciler.is_stale = lambda _: False
    world.reconciler.reconcile(KEY)
    deployment = world.cache.get(DEPLOYMENT, *KEY)
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 3
