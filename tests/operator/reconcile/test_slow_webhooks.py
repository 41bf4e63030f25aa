"""Admission webhooks of others that hang, are busy or reject in one namespace: others are served as always."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from harness.chart import operator_kubeconfig
from harness.process import OperatorProcess
from harness.space import Space, resource
from harness.webhook import validating
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

RESOURCES = 20
PATIENCE = 8.0
PAUSE = 30


@pytest.fixture
def good(plane: ControlPlane, space: Space) -> Iterator[Space]:
    """Another namespace."""
    other = Space(plane, f"{space.name[:50]}-good")
    other.create()
    yield other
    other.delete()


@pytest.fixture
def operator(plane: ControlPlane, space: Space, good: Space, tmp_path: Path) -> Iterator[OperatorProcess]:
    arguments = ("--namespace", space.name, "--namespace", good.name)
    started = OperatorProcess(operator_kubeconfig(plane), tmp_path / "log", arguments)
    started.start()
    yield started
    started.abandon()


def within(what: str, poll: Callable[[], object]) -> None:
    eventually(poll, within=PATIENCE, what=what, every=0.05)


def serve_heal_and_scale(space: Space, name: str = "chat") -> float:
    """Create a resource, delete one of its children, and scale it: each takes the operator a moment.

    Returns:
        The seconds that it took.
    """
    began = time.monotonic()
    space.apply(resource(name))
    within("the Deployment", lambda: space.get("deployment", name))
    space.finish_rollout(name)
    space.wait_condition("Ready", "True", "AllReplicasReady", name)
    uid = space.get("service", name)["metadata"]["uid"]
    space.kubectl("delete", "service", name, "--wait=false")
    within("the restored Service", lambda: space.get("service", name)["metadata"]["uid"] != uid)
    space.patch(f"fgd/{name}", {"spec": {"replicas": 2}})
    within("another replica", lambda: space.get("deployment", name)["spec"]["replicas"] == 2)
    return time.monotonic() - began


def test_a_webhook_that_times_out_in_one_namespace_delays_no_other(
    space: Space, good: Space, operator: OperatorProcess, tmp_path: Path
) -> None:
    """It takes ten seconds for each write, of more resources than there are workers."""
    released, wait = threading.Event(), threading.Event()

    def hang(_: Object) -> Object:
        if wait.is_set():
            released.wait(10)
        return {"allowed": True}

    with validating(space, tmp_path, hang) as hook:
        wait.set()
        for number in range(RESOURCES):
            space.apply(resource(f"chat{number}", replicas=0))
        eventually(lambda: len(set(hook.seen)) >= 5, within=20, what="workers that wait for the webhook", every=0.05)
        # A machine that stops for seconds delays one of them. The webhook would delay all three.
        assert any(serve_heal_and_scale(good, name) < 2 * PATIENCE for name in ("one", "two", "three"))
        assert operator.is_healthy()
        released.set()
    for number in range(RESOURCES):
        eventually(lambda n=number: space.get("deployment", f"chat{n}"), within=60, what=f"Deployment chat{number}")
    assert "Traceback" not in operator.log.read_text()


def refuse(code: int, seconds: int = 0) -> Object:
    details = {"retryAfterSeconds": seconds} if seconds else {}
    return {"allowed": False, "status": {"code": code, "message": "no", "details": details}}


@pytest.mark.parametrize(
    "answer", [refuse(403), refuse(429, PAUSE), refuse(503, PAUSE)], ids=["no", "busy", "unavailable"]
)
def test_a_webhook_that_rejects_one_kind_in_one_namespace_stops_no_other_kind_and_no_other_namespace(
    answer: Object, space: Space, good: Space, operator: OperatorProcess, tmp_path: Path
) -> None:
    refused: dict[str, list[float]] = {}

    def decide(request: Object) -> Object:
        if request["kind"]["kind"] != "PodDisruptionBudget":
            return {"allowed": True}
        refused.setdefault(request["name"], []).append(time.monotonic())
        return answer

    with validating(space, tmp_path, decide):
        for number in range(RESOURCES):
            space.apply(resource(f"chat{number}", replicas=2))
        within("the other children", lambda: len(space.items("deployments")) == RESOURCES)
        serve_heal_and_scale(good)
        assert space.items("poddisruptionbudgets") == []
        if answer["status"]["details"]:
            operator.let_resyncs_pass(2)
            for times in refused.values():
                assert all(later - earlier > PAUSE - 1 for earlier, later in pairwise(times)), "repeated too early"
        assert len(refused) == RESOURCES
    assert operator.is_healthy()
    assert "Traceback" not in operator.log.read_text()
