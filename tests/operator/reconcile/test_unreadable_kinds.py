"""A list or watch that fails makes one kind stale in one namespace, and stops nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.controlplane import ControlPlane
from harness.chart import SYSTEM, operator_kubeconfig
from harness.process import OperatorProcess
from harness.proxy import Answer, Fault, Gone, Hang, Proxy, Request
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

Start = Callable[..., OperatorProcess]


@pytest.fixture
def proxy(plane: ControlPlane) -> Iterator[Proxy]:
    with Proxy(operator_kubeconfig(plane)) as started:
        yield started


@pytest.fixture
def start(proxy: Proxy, space: Space, tmp_path: Path, operators: list[OperatorProcess]) -> Start:
    """Start operators behind the proxy, by default in the test's namespace. They relist only after minutes."""

    def start(*arguments: str, namespaces: tuple[str, ...] = (space.name,), **more: Any) -> OperatorProcess:
        watched = (each for name in namespaces for each in ("--namespace", name))
        defaults = (*watched, "--request-seconds", "1.5", "--relist-seconds", "300")
        kubeconfig = proxy.kubeconfig(tmp_path / "kubeconfig")
        operator = OperatorProcess(kubeconfig, tmp_path / "operator.log", (*defaults, *arguments), **more)
        operators.append(operator)
        operator.start()
        return operator

    return start


def serve(space: Space, name: str = "chat") -> None:
    space.apply(resource(name))
    space.make_ready(name)
    space.wait_condition("Ready", "True", "AllReplicasReady", name)


def scale(space: Space, replicas: int) -> None:
    space.patch("fgd/chat", {"spec": {"replicas": replicas}})
    space.make_ready(count=replicas)
    space.wait_condition("Ready", "True", "AllReplicasReady")


def stale(operator: OperatorProcess) -> set[str]:
    """Return the labels of what the operator cannot read."""
    return {key for (name, key), value in operator.metrics().items() if name == "fastgen_operator_stale" and value}


def fails(
    plural: str, fault: Fault, *, only: Callable[[Request], bool] = lambda _: True
) -> Callable[..., Fault | None]:
    """Inject the fault into all lists and watches of a kind."""

    def rule(request: Request) -> Fault | None:
        hit = request.method == "GET" and request.path.endswith(f"/{plural}") and only(request)
        return fault if hit else None

    return rule


def reports(plane: ControlPlane, reason: str) -> list[Object]:
    """Return the Events with that reason on the operator's Lease."""
    fields = f"involvedObject.kind=Lease,involvedObject.name=fastgen-operator,reason={reason}"
    text = plane.kubectl("get", "events", "--namespace", SYSTEM, "--field-selector", fields, "--output", "json")
    found: list[Object] = json.loads(text)["items"]
    return found


@pytest.mark.parametrize(
    ("plural", "fault"),
    [
        ("poddisruptionbudgets", Answer(403)),
        ("networkpolicies", Answer(500)),
        ("services", Hang()),
        ("jobs", Answer(404)),
        ("persistentvolumeclaims", Answer(503)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_kind_that_cannot_be_read_from_the_start_stops_no_other(
    plural: str, fault: Fault, proxy: Proxy, space: Space, start: Start
) -> None:
    proxy.rule = fails(plural, fault)
    operator = start()
    serve(space)
    scale(space, 2)
    assert stale(operator) == {f"{plural}/{space.name}"}
    assert operator.is_ready()
    assert operator.is_healthy()
    assert operator.log.read_text().count(f"listing {plural} in namespace {space.name}") == 1, "reported once"
    proxy.rule = lambda _: None
    eventually(lambda: stale(operator) == set(), within=30, what="everything to be read again")
    scale(space, 1)
    assert operator.stop() == 0
    assert "Traceback" not in operator.log.read_text()


def test_a_namespace_that_cannot_be_read_stops_no_other(proxy: Proxy, space: Space, start: Start) -> None:
    """A namespace of watchNamespaces that was deleted, with the operator's Role in it."""
    proxy.rule = lambda request: Answer(403) if "/namespaces/gone/" in request.path else None
    operator = start(namespaces=("gone", space.name))
    serve(space)
    operator.restart()
    scale(space, 2)
    assert {"fastgendeployments/gone", "pods/gone"} <= stale(operator)
    assert operator.is_healthy()
    operator.let_resyncs_pass(3)


def test_a_namespace_that_is_deleted_while_the_operator_runs_stops_no_other(
    plane: ControlPlane, proxy: Proxy, space: Space, start: Start
) -> None:
    other = Space(plane, f"{space.name[:40]}-other")
    other.create()
    operator = start(namespaces=(other.name, space.name))
    serve(other)
    serve(space)
    proxy.rule = lambda request: Answer(403) if f"/namespaces/{other.name}/" in request.path else None
    other.delete()
    proxy.cut_watches()
    eventually(lambda: f"pods/{other.name}" in stale(operator), within=20, what="the namespace to be reported")
    scale(space, 2)
    assert not any(label.endswith(f"/{space.name}") for label in stale(operator))
    assert operator.is_ready()
    assert operator.is_healthy()
    plane.kubectl("wait", "--for=delete", f"namespace/{other.name}", "--timeout=300s")
    proxy.rule = lambda _: None
    other.create()
    eventually(lambda: stale(operator) == set(), within=50, what="the namespace to be read again")
    serve(other)
    other.delete()


def test_replicas_are_not_counted_before_the_pods_are_listed(proxy: Proxy, space: Space, start: Start) -> None:
    operator = start()
    serve(space)
    written = space.settled()
    lists: list[str] = []

    def rule(request: Request) -> Fault | None:
        lists.append(request.path)
        return fails("pods", Answer(500))(request)

    proxy.rule = rule
    operator.stop()
    operator.launch()
    eventually(lambda: any(path.endswith("/jobs") for path in lists), within=20, what="the lists")
    eventually(lambda: operator.probe("readyz").status_code == 500, within=20, what="a probe that fails")
    assert f"pods in namespace {space.name}: injected 500" in operator.probe("readyz").json()["error"]
    assert operator.is_healthy()
    again = len(lists)
    eventually(lambda: any(path.endswith("/pods") for path in lists[again:]), within=20, what="a retry of the list")
    assert space.settled() == written, "nothing is known of the replicas, so nothing is written about them"
    proxy.rule = lambda _: None
    eventually(operator.is_ready, within=30, what="a ready operator")
    scale(space, 2)


@pytest.mark.parametrize("code", [500, 403, 410])
def test_a_watch_that_ends_with_an_error_is_opened_again(code: int, proxy: Proxy, space: Space, start: Start) -> None:
    operator = start()
    serve(space)
    ended: set[str] = set()

    def rule(request: Request) -> Fault | None:
        if not request.is_watch or request.path in ended:
            return None
        ended.add(request.path)
        return Gone(code)

    proxy.rule = rule
    proxy.cut_watches()
    eventually(lambda: len(ended) >= 10, within=20, what="an error in all watches")
    scale(space, 2)
    scale(space, 1)

    def opened_again() -> bool:
        opened = [request.path for request, _ in proxy.arrivals if request.is_watch]
        return all(opened.count(path) >= 3 for path in ended)

    # Each watch waits for its own pause before it is opened again.
    eventually(opened_again, within=20, what="all watches, opened again")
    assert operator.is_healthy()
    assert "Traceback" not in operator.log.read_text()


def test_a_watch_that_is_closed_at_once_is_opened_with_growing_pauses_and_replaced_by_lists(
    proxy: Proxy, space: Space, start: Start
) -> None:
    proxy.rule = fails("pods", Answer(200), only=lambda request: request.is_watch)
    began = time.monotonic()
    operator = start()
    serve(space)
    scale(space, 2)
    assert stale(operator) == {f"pods/{space.name}"}
    opened = [request for request, _ in proxy.arrivals if request.is_watch and request.path.endswith("/pods")]
    assert len(opened) <= 2 + (time.monotonic() - began)
    assert operator.is_healthy()


def test_a_watch_that_always_fails_is_replaced_by_lists_and_the_lease_is_released_at_the_end(
    plane: ControlPlane, proxy: Proxy, space: Space, start: Start
) -> None:
    plane.kubectl("delete", "leases", "--all", "--namespace", SYSTEM)
    plane.kubectl("delete", "events", "--all", "--namespace", SYSTEM)
    rule = fails("pods", Gone(500), only=lambda request: request.is_watch)
    proxy.rule = rule
    operator = start("--stall-seconds", "3", election=("--lease-namespace", SYSTEM))
    eventually(operator.leads, within=20, what="a leader")
    serve(space)
    scale(space, 2)
    assert stale(operator) == {f"pods/{space.name}"}
    eventually(operator.is_healthy, within=20, what="a passing probe: a restart would not help")
    (event,) = eventually(lambda: reports(plane, "KindStale"), within=20, what="an Event on the Lease")
    assert event["message"] == (f"pods in namespace {space.name} cannot be read: injected 500; the operator retries")
    assert not reports(plane, "KindRead")
    proxy.rule = lambda _: None
    eventually(lambda: reports(plane, "KindRead"), within=80, what="an Event that the pods can be read again")
    proxy.rule = rule
    assert operator.stop() == 0
    found = plane.kubectl("get", "lease", "fastgen-operator", "--namespace", SYSTEM, "--output", "json")
    assert json.loads(found)["spec"].get("holderIdentity", "") == ""


def test_an_optional_kind_whose_conversion_webhook_is_dead_stops_no_other(
    plane: ControlPlane, space: Space, start: Start
) -> None:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    versions = [
        {"name": name, "served": True, "storage": stored, "schema": schema}
        for name, stored in (("v1", False), ("v0", True))
    ]
    client = {"url": "https://127.0.0.1:1/convert"}
    conversion = {"strategy": "Webhook", "webhook": {"clientConfig": client, "conversionReviewVersions": ["v1"]}}
    names = {"plural": "podmonitors", "singular": "podmonitor", "kind": "PodMonitor", "listKind": "PodMonitorList"}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "podmonitors.monitoring.coreos.com"},
        "spec": {
            **{"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names},
            **{"versions": versions, "conversion": conversion},
        },
    }
    old = {
        "apiVersion": "monitoring.coreos.com/v0",
        "kind": "PodMonitor",
        "metadata": {"name": "old", "labels": {"fastgen.dev/deployment": "chat"}},
    }
    plane.kubectl("apply", "--server-side", "--filename", "-", stdin=json.dumps(crd))
    try:
        plane.wait_for_crds(crd["metadata"]["name"])
        eventually(lambda: space.apply(old), within=20, what="an object of the old version")
        # The API server tries the webhook several times.
        operator = start("--request-seconds", "20")
        serve(space)
        scale(space, 2)
        assert stale(operator) == {f"podmonitors/{space.name}"}
        assert "conversion webhook" in operator.log.read_text()
        assert operator.is_healthy()
    finally:
        plane.kubectl("delete", "crd", crd["metadata"]["name"], "--wait=false")
    eventually(lambda: stale(operator) == set(), within=30, what="the kind to be forgotten with its CRD")
    scale(space, 1)
