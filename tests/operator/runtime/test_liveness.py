"""A frozen operator says so to the kubelet, whatever it is that froze; one that stands by does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, POD, Key, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.relist import Relister
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches, uid_of, version_of
from fastgen_operator.metrics import Metrics
from fastgen_operator.runtime.controller import Controller
from fastgen_operator.runtime.health_server import HealthServer
from fastgen_operator.runtime.leader_election import SoleLeadership
from fastgen_operator.runtime.liveness import Heartbeat, Sign, Stalled
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
    """Leadership of an operator whose turn never comes."""

    def holds(self) -> bool:
        return False

    async def wait(self) -> None:
        await asyncio.Event().wait()


def resource_of(number: int) -> Object:
    found = stored(f"chat{number}")
    return {**found, "metadata": {**found["metadata"], "uid": f"uid-{number}"}}


@dataclass
class Stuck:
    """Visits that hang until released, of a cluster with some resources."""

    gate: threading.Event = field(default_factory=threading.Event)
    resources: int = 1
    fault: KubeError | None = None

    def list(self, kind: Any, namespace: str | None, selector: str) -> tuple[str, Iterator[Object]]:
        assert (kind, namespace, selector) == (FASTGEN, None, "")
        if self.fault is not None:
            raise self.fault
        return "1", iter([resource_of(number) for number in range(self.resources)])

    def refresh(self) -> bool:
        return False

    def reconcile(self, _: Key) -> None:
        self.gate.wait(20)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    cluster = Stuck()
    yield cluster
    cluster.gate.set()


def controller_of(stuck: Any, leadership: Any = None) -> Controller:
    cache = InformerCache()
    watches = Watches(time.monotonic, (FASTGEN,))
    relister = Relister(stuck, cache, watches, lambda: (), (None,))
    watches.delivered(FASTGEN, resource_of(0), None)
    return Controller(SETTINGS, cache, relister, stuck, stuck, Metrics(), leadership or SoleLeadership(), watches)


async def complaint(controller: Controller) -> str:
    def look() -> str:
        try:
            controller.heartbeat.check()
        except Stalled as stalled:
            return str(stalled)
        return ""

    return await asyncio.to_thread(eventually, look, within=10, what="a complaint", every=0.05)


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


def test_ages_go_on_growing_while_the_loop_hangs_but_not_those_of_what_rests() -> None:
    clock = Clock()
    heartbeat = Heartbeat(clock, (Sign("busy", lambda: 5.0, 90), Sign("idle", lambda: 0.0, 90)), loop_limit=30)
    clock.now = 20
    assert heartbeat.check() == {"loopSeconds": 20.0, "busy": 25.0, "idle": 0.0}
    clock.now = 31
    with pytest.raises(Stalled, match="loopSeconds is 31"):
        heartbeat.check()


async def test_workers_that_are_deadlocked_make_the_probe_fail_though_lists_go_on(stuck: Stuck) -> None:
    """One resource, so that nothing waits in the queue: the visit itself is what is too old."""
    controller = controller_of(stuck)
    tasks = controller.start()
    try:
        await asyncio.wait_for(controller.listed.wait(), 5)
        controller.heartbeat.check()
        assert (await complaint(controller)).startswith("visitSeconds is ")
    finally:
        stuck.gate.set()
        await stop(tasks)


async def test_one_that_stands_by_is_healthy_and_ready_though_its_queue_is_full(stuck: Stuck) -> None:
    controller = controller_of(stuck, Standby())
    tasks = controller.start()
    try:
        await asyncio.wait_for(controller.listed.wait(), 5)
        await asyncio.sleep(3 * SETTINGS.stall_seconds)
        assert controller.queue.oldest_wait() > SETTINGS.stall_seconds
        ages = controller.heartbeat.check()
        assert ages["queueSeconds"] == ages["visitSeconds"] == 0.0
        assert controller.check_ready() == {"leads": 0.0}
    finally:
        await stop(tasks)


async def test_lists_that_fail_make_the_probe_fail_and_it_is_never_ready() -> None:
    controller = controller_of(Stuck(fault=KubeError(0, "no route")))
    tasks = controller.start()
    try:
        with pytest.raises(Stalled, match="could not be listed"):
            controller.check_ready()
        assert (await complaint(controller)).startswith("resyncSeconds is ")
    finally:
        await stop(tasks)


async def test_a_silent_watch_makes_the_probe_fail_though_lists_and_visits_go_on(stuck: Stuck) -> None:
    """The lists show a second resource that no watch has told of."""
    stuck.gate.set()
    stuck.resources = 2
    controller = controller_of(stuck)
    tasks = controller.start()
    try:
        assert (await complaint(controller)).startswith("watchSeconds is ")
    finally:
        await stop(tasks)


def test_an_event_loop_that_hangs_is_answered_for_by_the_servers_own_thread() -> None:
    heard: list[httpx.Response] = []

    async def run() -> None:
        controller = controller_of(Stuck(gate=threading.Event(), resources=0))
        server = HealthServer("127.0.0.1", 0, {"/healthz": controller.heartbeat.check})
        server.start()
        url = f"http://127.0.0.1:{server.port}"
        tasks = controller.start()
        try:
            await asyncio.wait_for(controller.listed.wait(), 5)
            heard.append(await asyncio.to_thread(httpx.get, f"{url}/healthz"))

            def hang() -> bool:
                heard.append(httpx.get(f"{url}/healthz"))
                return heard[-1].status_code == 500 and "loopSeconds" in heard[-1].text

            # Called in the loop, which turns no more until it returns.
            eventually(hang, within=10, what="a failing probe", every=0.05)
            heard.append(await asyncio.to_thread(httpx.get, f"{url}/other"))
        finally:
            await stop(tasks)
            server.stop()

    asyncio.run(run())
    assert heard[0].status_code == 200
    assert set(heard[0].json()) == {"loopSeconds", "resyncSeconds", "queueSeconds", "visitSeconds", "watchSeconds"}
    assert heard[-2].json()["error"].startswith("loopSeconds is ")
    assert heard[-1].status_code == 404


def obj(version: int, uid: str = "u") -> Object:
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}}


def versions(*objects: Object) -> dict[str, int]:
    return {uid_of(obj): version_of(obj) for obj in objects}


def test_a_change_that_a_list_shows_and_the_watch_does_not_tell_of_ages_until_it_does() -> None:
    clock = Clock()
    watches = Watches(clock, (FASTGEN, DEPLOYMENT))
    watches.delivered(FASTGEN, obj(5), None)
    watches.listed(FASTGEN, versions(obj(5)))
    assert watches.behind() == 0
    watches.listed(FASTGEN, versions(obj(7)))
    clock.now = 30
    watches.listed(FASTGEN, versions(obj(9)))
    assert watches.behind() == 30, "a newer change does not make the older one any younger"
    watches.delivered(FASTGEN, obj(8), "MODIFIED")
    assert watches.behind() == 30
    watches.delivered(FASTGEN, obj(9), "MODIFIED")
    assert watches.behind() == 0


def test_a_resource_that_changes_all_the_time_is_not_behind() -> None:
    clock = Clock()
    watches = Watches(clock, (FASTGEN, DEPLOYMENT))
    for step in range(1, 50):
        clock.now = step * 30
        watches.listed(FASTGEN, versions(obj(step)))
        watches.delivered(FASTGEN, obj(step), "MODIFIED")
        assert watches.behind() == 0


def test_a_quiet_cluster_is_not_behind_nor_is_one_whose_objects_were_deleted() -> None:
    clock = Clock()
    watches = Watches(clock, (FASTGEN, DEPLOYMENT))
    watches.delivered(FASTGEN, obj(1), None)
    watches.listed(FASTGEN, versions(obj(1), obj(2, "new")))
    watches.delivered(DEPLOYMENT, obj(1, "other"), None)
    watches.listed(FASTGEN, versions(obj(1)))
    watches.listed(POD, versions(obj(7, "of a kind that is not watched")))
    clock.now = 1e6
    assert watches.behind() == 0
    watches.delivered(FASTGEN, obj(3), "DELETED")
    watches.listed(FASTGEN, {})
    assert watches.behind() == 0


def test_an_object_made_while_the_list_was_under_way_is_not_behind() -> None:
    watches = Watches(Clock(), (FASTGEN,))
    watches.delivered(FASTGEN, obj(8, "new"), "ADDED")
    watches.listed(FASTGEN, {})
    watches.listed(FASTGEN, versions(obj(8, "new")))
    assert watches.behind() == 0
