"""A stalled operator fails its liveness probe, whichever part stalls; a standby does not."""

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
    def poll() -> str:
        try:
            controller.heartbeat.check()
        except Stalled as stalled:
            return str(stalled)
        return ""

    return await asyncio.to_thread(eventually, poll, within=20, what="a complaint", every=0.05)


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
    controller = controller_of(stuck)
    tasks = controller.start()
    try:
        await asyncio.wait_for(controller.listed.wait(), 5)
        controller.heartbeat.check()
        assert (await complaint(controller)).startswith("visitSeconds is ")
    finally:
        stuck.gate.set()
        await stop(tasks)


async def test_a_standby_is_healthy_and_ready_although_its_queue_is_full(stuck: Stuck) -> None:
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


async def test_failing_lists_fail_the_liveness_and_the_readiness_probe() -> None:
    controller = controller_of(Stuck(fault=KubeError(0, "no route")))
    tasks = controller.start()
    try:
        with pytest.raises(Stalled, match="could not be listed"):
            controller.check_ready()
        assert (await complaint(controller)).startswith("resyncSeconds is ")
    finally:
        await stop(tasks)


async def test_a_silent_watch_fails_the_probe_although_lists_and_reconciles_continue(stuck: Stuck) -> None:
    """The lists show a second resource that no watch has delivered."""
    stuck.gate.set()
    stuck.resources = 2
    controller = controller_of(stuck)
    tasks = controller.start()
    try:
        assert (await complaint(controller)).startswith("watchSeconds is ")
    finally:
        await stop(tasks)


def test_the_probe_server_responds_while_the_event_loop_hangs() -> None:
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

            # Called in the event loop, which it blocks.
            eventually(hang, within=20, what="a failing probe", every=0.05)
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


def test_a_change_that_only_a_list_shows_ages_until_the_watch_delivers_it() -> None:
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


def test_a_watch_of_a_constantly_changing_resource_is_not_behind() -> None:
    clock = Clock()
    watches = Watches(clock, (FASTGEN, DEPLOYMENT))
    for step in range(1, 50):
        clock.now = step * 30
        watches.listed(FASTGEN, versions(obj(step)))
        watches.delivered(FASTGEN, obj(step), "MODIFIED")
        assert watches.behind() == 0


def test_a_watch_of_a_quiet_cluster_or_of_deleted_objects_is_not_behind() -> None:
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


def test_an_object_created_during_a_list_is_not_behind() -> None:
    watches = Watches(Clock(), (FASTGEN,))
    watches.delivered(FASTGEN, obj(8, "new"), "ADDED")
    watches.listed(FASTGEN, {})
    watches.listed(FASTGEN, versions(obj(8, "new")))
    assert watches.behind() == 0
