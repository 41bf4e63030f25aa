"""A stuck operator fails its liveness probe, whichever part is stuck; a busy one and a standby do not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, POD, Key, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.relist import Relister
from fastgen_operator.kube.sources import ESSENTIAL, Sources
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches, uid_of
from fastgen_operator.metrics import Metrics
from fastgen_operator.objects.stored import version_of
from fastgen_operator.runtime.controller import Controller
from fastgen_operator.runtime.http_servers import health_server
from fastgen_operator.runtime.leader_election import SoleLeadership
from fastgen_operator.runtime.liveness import Heartbeat, Progress, Sign, Stalled
from fastgen_operator.runtime.settings import Settings
from harness.objects import stored
from support.waiting import eventually

SETTINGS = Settings(engine_image="e", resync_seconds=0.05, retry_seconds=0.01, stall_seconds=0.5, workers=2)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Standby:
    """Leadership of an operator that never becomes leader."""

    def holds(self) -> bool:
        return False

    async def wait(self) -> None:
        await asyncio.Event().wait()


def resource_of(number: int) -> Object:
    found = stored(f"chat{number}")
    return {**found, "metadata": {**found["metadata"], "uid": f"uid-{number}"}}


@dataclass
class Stuck:
    """A cluster with some resources, and reconciles that hang until released."""

    gate: threading.Event = field(default_factory=threading.Event)
    resources: int = 1
    fault: KubeError | None = None
    settled: tuple[Key, ...] = ()
    reconciled: list[Key] = field(default_factory=list)
    list_gate: threading.Event = field(default_factory=threading.Event)
    lists: int = 0

    def __post_init__(self) -> None:
        self.list_gate.set()

    def list(self, kind: Any, namespace: str | None, selector: str) -> tuple[str, Iterator[Object]]:
        assert (kind, namespace, selector) == (FASTGEN, None, "")
        self.lists += 1
        self.list_gate.wait(600)
        if self.fault is not None:
            raise self.fault
        return "1", iter([resource_of(number) for number in range(self.resources)])

    def refresh(self) -> bool:
        return False

    def refresh_pickers(self) -> bool:
        return False

    def unsettled(self, keys: Sequence[Key]) -> Sequence[Key]:
        return [key for key in keys if key not in self.settled]

    def reconcile(self, key: Key) -> None:
        self.reconciled.append(key)
        self.gate.wait(600)

    def seconds_until_due(self, _: Key) -> None:
        return None


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    cluster = Stuck()
    yield cluster
    cluster.gate.set()


def controller_of(stuck: Any, leadership: Any = None, clock: Callable[[], float] = time.monotonic) -> Controller:
    cache = InformerCache()
    watches = Watches(clock, (FASTGEN,))
    sources = listed_but(FASTGEN)
    relister = Relister(stuck, cache, watches, sources, lambda: (), (None,))
    watches.delivered(FASTGEN, resource_of(0), None)
    leadership, progress = leadership or SoleLeadership(), Progress(clock)
    return Controller(SETTINGS, cache, relister, stuck, stuck, Metrics(), leadership, watches, sources, progress, clock)


def listed_but(*missing: Kind) -> Sources:
    """Return sources of which all but these kinds have been listed."""
    sources = Sources((None,))
    for kind in set(ESSENTIAL) - set(missing):
        sources.succeeded((kind, None), "list")
    return sources


class Timed:
    """A controller with a clock of its own whose workers run, and whose reconciles the test defines.

    Its resync does not run unless a test starts it; `check` counts as its step. Lists fail after a minute.
    """

    def __init__(self, reconcile: Callable[[Timed], None]) -> None:
        self.clock = Clock()
        self.progress = Progress(self.clock)
        self._reconcile = reconcile
        self.reconciles = self.lists = 0
        self.due: float | None = None
        cluster: Any = self
        self._metrics = Metrics()
        watches, leadership = Watches(self.clock, ()), SoleLeadership()
        self.controller = Controller(
            *(
                Settings(engine_image="e", workers=1, retry_seconds=0.001),
                InformerCache(),
                cluster,
                cluster,
                cluster,
                self._metrics,
            ),
            *(leadership, watches, listed_but(), self.progress, self.clock),
        )

    def reconcile(self, _: Key) -> None:
        try:
            self._reconcile(self)
        finally:
            self.reconciles += 1

    def seconds_until_due(self, _: Key) -> float | None:
        return self.due

    def refresh(self) -> bool:
        return True

    def refresh_pickers(self) -> bool:
        return False

    def relist(self) -> set[Key]:
        self.lists += 1
        self.clock.now += 60
        raise KubeError(0, "no route")

    async def work(self, resources: int) -> None:
        """Reconcile that many resources, which are queued at once."""
        for number in range(resources):
            self.controller.queue.add(("space", f"chat{number}"))
        self.controller.listed.set()
        worker = asyncio.create_task(self.controller._work())
        async with asyncio.timeout(120):
            while self.reconciles < resources or self.controller._busy:
                await asyncio.sleep(0.001)
        await stop([worker])

    def stalled(self) -> float | None:
        """Return the seconds without progress, as exported."""
        return self._metrics.registry.get_sample_value("fastgen_operator_stalled_seconds")

    def check(self) -> dict[str, float]:
        """Return the ages as of now; raise Stalled."""
        listing = threading.Thread(target=self.progress.run, args=("list", lambda: None))
        listing.start()
        listing.join()
        self.controller.heartbeat.beat()
        return self.controller.heartbeat.check()


async def test_a_queue_that_waits_for_an_hour_is_healthy_while_the_worker_makes_steps() -> None:
    """Each request to the API server takes a minute: slow, but not stuck."""
    waits: list[float] = []

    def slow(timed: Timed) -> None:
        for _ in range(3):
            timed.clock.now += 60
            timed.progress.step()
            timed.clock.now += 20
            waits.append(timed.controller.queue.oldest_wait())
            ages = timed.check()
            assert ages["reconcileSeconds"] == 20

    timed = Timed(slow)
    await timed.work(20)
    assert len(waits) == 60, "no check failed"
    assert max(waits) > 3600


async def test_a_worker_without_a_step_fails_the_probe_although_nothing_waits() -> None:
    complaints: list[str] = []

    def hang(timed: Timed) -> None:
        timed.clock.now += 90
        timed.check()
        timed.clock.now += 1
        with pytest.raises(Stalled) as stalled:
            timed.check()
        complaints.append(str(stalled.value))

    await Timed(hang).work(1)
    assert complaints == ["reconcileSeconds is 91.0, above 90"]


async def test_a_metric_shows_how_long_a_worker_hangs_although_resyncs_continue() -> None:
    seen: list[float] = []

    def hang(timed: Timed) -> None:
        for _ in range(2):
            timed.clock.now += 40
            timed.check()
            seen.append(timed.stalled())

    timed = Timed(hang)
    await timed.work(1)
    timed.check()
    assert [*seen, timed.stalled()] == [40, 80, 0]
    timed.controller.queue.add(("space", "chat"))
    timed.clock.now += 30
    timed.check()
    assert timed.stalled() == 30, "a resource waits, and no worker takes it"
    timed.clock.now += 50
    assert timed.stalled() == 80, "the loop hangs"


def test_the_metric_of_stalls_leaves_out_the_ages_of_resyncs_and_watches() -> None:
    heartbeat = Heartbeat(Clock(), (Sign("busy", lambda: 5.0, 90), Sign("resync", lambda: 25.0, 90)), loop_limit=30)
    assert heartbeat.stalled(("busy",)) == 5


async def test_a_worker_that_takes_nothing_fails_the_probe_although_lists_continue() -> None:
    timed = Timed(lambda _: None)
    await timed.work(1)
    timed.clock.now += 10_000
    assert timed.check()["queueSeconds"] == 0.0, "idle"
    timed.controller.queue.add(("space", "chat"))
    timed.clock.now += 90
    assert timed.check()["queueSeconds"] == 90.0
    timed.clock.now += 1
    with pytest.raises(Stalled, match=r"queueSeconds is 91\.0, above 90"):
        timed.check()


async def test_a_pause_that_the_api_server_asked_for_is_not_a_stall() -> None:
    def refused(_: Timed) -> None:
        raise KubeError(429, "too many requests", 60, is_status=False)

    timed = Timed(refused)
    await timed.work(1)
    timed.controller.queue.add(("space", "other"))
    timed.clock.now += 140
    assert timed.check()["queueSeconds"] == 80.0, "counted from the end of the pause"
    timed.clock.now += 11
    with pytest.raises(Stalled, match="queueSeconds"):
        timed.check()


async def test_a_resource_is_reconciled_when_it_is_due_without_an_event() -> None:
    def once(timed: Timed) -> None:
        timed.due = 0.001 if timed.reconciles == 0 else None

    timed = Timed(once)
    timed.controller.queue.add(("space", "chat"))
    timed.controller.listed.set()
    worker = asyncio.create_task(timed.controller._work())
    async with asyncio.timeout(120):
        while timed.reconciles < 2:
            await asyncio.sleep(0.001)
    await stop([worker])


def test_progress_is_recorded_by_thread_and_kind_of_work() -> None:
    clock = Clock()
    progress = Progress(clock)
    entered, leave = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert leave.wait(60)

    thread = threading.Thread(target=lambda: progress.run("reconcile", hang))
    thread.start()
    assert entered.wait(60)
    clock.now = 50
    progress.step()
    progress.run("list", progress.step)
    assert (progress.stuck("reconcile"), progress.stuck("list")) == (50, 0)
    assert (progress.last("reconcile"), progress.last("list")) == (0, 50)
    clock.now = 60
    progress.run("reconcile", progress.step)
    assert (progress.stuck("reconcile"), progress.last("reconcile")) == (60, 60), "another thread makes steps"
    leave.set()
    thread.join(60)
    assert progress.stuck("reconcile") == 0


async def wait_complaint(controller: Controller, sign: str) -> None:
    """Wait until the probe fails because of the sign. It may fail for another reason while the machine is busy."""

    def poll() -> bool:
        try:
            controller.heartbeat.check()
        except Stalled as stalled:
            return str(stalled).startswith(f"{sign} is ")
        return False

    await asyncio.to_thread(eventually, poll, within=20, what=f"a complaint about {sign}", every=0.05)


async def healthy(controller: Controller) -> dict[str, float]:
    """Wait until the probe passes, and return its values."""
    return await asyncio.to_thread(
        eventually, controller.heartbeat.check, within=20, what="a passing probe", every=0.05
    )


async def stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_each_sign_of_life_has_its_limit_and_the_probe_shows_all() -> None:
    clock = Clock()
    age = {"workSeconds": 0.0}
    heartbeat = Heartbeat(clock, (Sign("workSeconds", lambda: age["workSeconds"], 90),), loop_limit=30)
    assert heartbeat.check() == {"loopSeconds": 0.0, "workSeconds": 0.0}
    age["workSeconds"] = 91
    heartbeat.beat()
    with pytest.raises(Stalled, match=r"workSeconds is 91\.0, above 90"):
        heartbeat.check()


def test_ages_grow_while_the_loop_hangs_except_those_of_idle_signs() -> None:
    clock = Clock()
    heartbeat = Heartbeat(clock, (Sign("busy", lambda: 5.0, 90), Sign("idle", lambda: 0.0, 90)), loop_limit=30)
    clock.now = 20
    assert heartbeat.check() == {"loopSeconds": 20.0, "busy": 25.0, "idle": 0.0}
    clock.now = 31
    with pytest.raises(Stalled, match="loopSeconds is 31"):
        heartbeat.check()


async def test_deadlocked_workers_fail_the_probe_although_lists_continue(stuck: Stuck) -> None:
    """One resource, so that nothing waits in the queue: the reconcile itself takes too long."""
    clock = Clock()
    controller = controller_of(stuck, clock=clock)
    tasks = controller.start()
    try:
        await asyncio.to_thread(eventually, lambda: stuck.reconciled, within=20, what="a reconcile", every=0.01)
        await healthy(controller)
        clock.now += 2 * SETTINGS.stall_seconds
        await wait_complaint(controller, "reconcileSeconds")
    finally:
        stuck.gate.set()
        await stop(tasks)


async def test_a_standby_is_healthy_and_ready_although_its_queue_is_full(stuck: Stuck) -> None:
    clock = Clock()
    controller = controller_of(stuck, Standby(), clock)
    tasks = controller.start()
    try:
        await asyncio.wait_for(controller.listed.wait(), 60)
        clock.now += 3 * SETTINGS.stall_seconds
        assert controller.queue.oldest_wait() > SETTINGS.stall_seconds
        ages = await healthy(controller)
        assert ages["queueSeconds"] == ages["reconcileSeconds"] == 0.0
        assert controller.check_ready() == {"leads": 0.0}
    finally:
        await stop(tasks)


async def test_a_resync_queues_only_the_resources_that_are_not_settled(stuck: Stuck) -> None:
    stuck.gate.set()
    stuck.resources, stuck.settled = 2, (("space", "chat0"),)
    tasks = controller_of(stuck).start()
    try:
        again = [("space", "chat1")] * 3
        await asyncio.to_thread(eventually, lambda: stuck.reconciled[-3:] == again, within=20, what="three", every=0.01)
        assert stuck.reconciled.count(("space", "chat0")) == 1, "when the first list has found it"
    finally:
        await stop(tasks)


async def test_failing_lists_fail_the_readiness_probe_only() -> None:
    """A restart does not bring back the API server. Each list takes a minute until it fails."""
    timed = Timed(lambda _: None)
    resync = asyncio.create_task(timed.controller._resync())
    try:
        await asyncio.to_thread(eventually, lambda: timed.lists > 6, within=30, what="seven lists", every=0.01)
        timed.controller.heartbeat.beat()
        assert timed.controller.heartbeat.check()["resyncSeconds"] <= 60
        with pytest.raises(Stalled, match="could not be listed"):
            timed.controller.check_ready()
    finally:
        await stop([resync])


async def test_a_list_that_hangs_fails_the_liveness_probe(stuck: Stuck) -> None:
    """A request of the official client has a timeout; this one does not."""
    stuck.list_gate.clear()
    controller = controller_of(stuck)
    tasks = controller.start()
    try:
        await wait_complaint(controller, "resyncSeconds")
    finally:
        stuck.list_gate.set()
        await stop(tasks)


async def test_a_silent_watch_fails_the_probe_although_lists_and_reconciles_continue(stuck: Stuck) -> None:
    """The lists show a second resource that no watch has delivered."""
    stuck.gate.set()
    stuck.resources = 2
    controller = controller_of(stuck)
    tasks = controller.start()
    try:
        await wait_complaint(controller, "watchSeconds")
    finally:
        await stop(tasks)


def test_the_probe_server_responds_while_the_event_loop_hangs() -> None:
    heard: list[httpx.Response] = []

    async def run() -> None:
        controller = controller_of(Stuck(gate=threading.Event(), resources=0))
        server = health_server("127.0.0.1", 0, {"/healthz": controller.heartbeat.check})
        server.start()
        url = f"http://127.0.0.1:{server.port}"
        tasks = controller.start()
        try:
            await asyncio.wait_for(controller.listed.wait(), 60)

            def get(path: str) -> httpx.Response:
                return httpx.get(f"{url}/{path}", timeout=60)

            def passes() -> bool:
                heard[:] = [get("healthz")]
                return heard[0].status_code == 200

            await asyncio.to_thread(eventually, passes, within=20, what="a passing probe", every=0.05)

            def hang() -> bool:
                heard.append(get("healthz"))
                return heard[-1].status_code == 500 and "loopSeconds" in heard[-1].text

            # Called in the event loop, which it blocks.
            eventually(hang, within=20, what="a failing probe", every=0.05)
            heard.append(await asyncio.to_thread(get, "other"))
        finally:
            await stop(tasks)
            server.stop()

    asyncio.run(run())
    assert heard[0].status_code == 200
    signs = {"loopSeconds", "resyncSeconds", "queueSeconds", "reconcileSeconds", "watchSeconds"}
    assert set(heard[0].json()) == signs
    assert heard[-2].json()["error"].startswith("loopSeconds is ")
    assert heard[-1].status_code == 404


def obj(version: int, uid: str = "u") -> Object:
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}}


def versions(*objects: Object) -> dict[str, int]:
    return {uid_of(obj): version_of(obj) for obj in objects}


def test_a_change_that_only_a_list_shows_ages_until_the_watch_delivers_it() -> None:
    clock = Clock()
    watches = Watches(clock, (FASTGEN, DEPLOYMENT))
    watches.delivered(FASTGEN, obj(5), None)
    watches.listed(FASTGEN, None, versions(obj(5)))
    assert watches.behind() == 0
    watches.listed(FASTGEN, None, versions(obj(7)))
    clock.now = 30
    watches.listed(FASTGEN, None, versions(obj(9)))
    assert watches.behind() == 30, "a newer change does not make the older one any younger"
    clock.now = 40
    watches.delivered(FASTGEN, obj(8), "MODIFIED")
    clock.now = 70
    assert watches.behind() == 30, "since the last event"
    watches.delivered(FASTGEN, obj(9), "MODIFIED")
    assert watches.behind() == 0


def test_a_watch_of_a_constantly_changing_resource_is_not_behind() -> None:
    clock = Clock()
    watches = Watches(clock, (FASTGEN, DEPLOYMENT))
    for step in range(1, 50):
        clock.now = step * 30
        watches.listed(FASTGEN, None, versions(obj(step)))
        watches.delivered(FASTGEN, obj(step), "MODIFIED")
        assert watches.behind() == 0


def test_the_first_event_of_a_watch_may_take_longer() -> None:
    clock = Clock()
    watches = Watches(clock, (FASTGEN,), patience=300)
    watches.listed(FASTGEN, None, versions(obj(1), obj(2, "other")))
    clock.now = 300
    assert watches.behind() == 0
    clock.now = 310
    assert watches.behind() == 10
    watches.delivered(FASTGEN, obj(1), None)
    clock.now = 330
    assert watches.behind() == 20


def test_a_watch_of_a_quiet_cluster_or_of_deleted_objects_is_not_behind() -> None:
    clock = Clock()
    watches = Watches(clock, (FASTGEN, DEPLOYMENT))
    watches.delivered(FASTGEN, obj(1), None)
    watches.listed(FASTGEN, None, versions(obj(1), obj(2, "new")))
    watches.delivered(DEPLOYMENT, obj(1, "other"), None)
    watches.listed(FASTGEN, None, versions(obj(1)))
    watches.listed(POD, None, versions(obj(7, "of a kind that is not watched")))
    clock.now = 1e6
    assert watches.behind() == 0
    watches.delivered(FASTGEN, obj(3), "DELETED")
    watches.listed(FASTGEN, None, {})
    assert watches.behind() == 0


def test_a_watch_that_lags_but_delivers_is_not_stuck_and_other_namespaces_do_not_hide_one_that_is() -> None:
    clock = Clock()
    watches = Watches(clock, (FASTGEN,), ("a", "b"))

    def of(namespace: str, version: int) -> Object:
        found = obj(version, f"{namespace}{version}")
        return {**found, "metadata": {**found["metadata"], "namespace": namespace}}

    for namespace in ("a", "b"):
        watches.listed(FASTGEN, namespace, versions(*(of(namespace, version) for version in range(1, 9))))
    for step in range(1, 8):
        clock.now = 60 * step
        watches.delivered(FASTGEN, of("a", step), None)
        assert watches.behind() == clock.now, "nothing came from the watch of b"
    for step in range(1, 9):
        watches.delivered(FASTGEN, of("b", step), None)
    assert watches.behind() == 0, "the watch of a has one to come, and has just delivered"
    clock.now += 100
    assert watches.behind() == 100


def test_an_object_created_during_a_list_is_not_behind() -> None:
    watches = Watches(Clock(), (FASTGEN,))
    watches.delivered(FASTGEN, obj(8, "new"), "ADDED")
    watches.listed(FASTGEN, None, {})
    watches.listed(FASTGEN, None, versions(obj(8, "new")))
    assert watches.behind() == 0


async def test_a_resource_that_was_edited_while_the_operator_was_down_is_reconciled_before_the_others(
    stuck: Stuck,
) -> None:
    controller = controller_of(stuck)
    keys = []
    for number, generation in enumerate((0, 2, 3)):
        resource = resource_of(number)
        resource["metadata"]["generation"] = 3
        # The CRD has a default of 0, for a resource that has never been reconciled.
        conditions = [{"type": "Progressing", "reason": "Complete", "status": "False"}] if generation else []
        resource["status"] = {"observedGeneration": generation, "conditions": conditions}
        controller.cache.put(FASTGEN, resource)
        keys.append((resource["metadata"]["namespace"], resource["metadata"]["name"]))
    for key in keys:
        controller.add_listed(key)
    new, edited, handled = keys
    for key in (edited, new, handled):
        assert await controller.queue.take() == key
        controller.queue.done(key)
