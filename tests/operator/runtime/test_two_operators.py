"""Two operators against a real API server: one leads, the other takes over, and both never write at once."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.reconcile.backoff import FREE_RESTORES
from harness.chart import SYSTEM, operator_kubeconfig
from harness.process import OperatorProcess
from harness.proxy import Late, Proxy, Request, Slow
from harness.short_lease import LEASE_SECONDS, SHORT_LEASE, wait_renewal
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

PLACE = ("--lease-namespace", SYSTEM)

Start = Callable[..., OperatorProcess]


@pytest.fixture
def start(plane: ControlPlane, space: Space, tmp_path: Path, operators: list[OperatorProcess]) -> Start:
    """Return a function that starts operators with leader election in the test's namespace."""
    plane.kubectl("delete", "leases", "--all", "--namespace", SYSTEM)
    credentials = operator_kubeconfig(plane)

    def start(*terms: str, kubeconfig: Path | None = None) -> OperatorProcess:
        log = tmp_path / f"operator{len(operators)}.log"
        operator = OperatorProcess(
            kubeconfig or credentials, log, ("--namespace", space.name), election=(*PLACE, *terms)
        )
        operators.append(operator)
        operator.start()
        return operator

    return start


def lease(space: Space) -> Object:
    found: Object = json.loads(
        space.cluster.kubectl("get", "lease", "fastgen-operator", "--namespace", SYSTEM, "--output", "json")
    )["spec"]
    return found


def wait_leads(operator: OperatorProcess, within: float, reconciles: int = 0) -> None:
    """Wait until it leads and has completed a number of reconciles."""
    eventually(operator.leads, within=within, what=f"leadership (log: {operator.log})", every=0.05)
    eventually(lambda: operator.reconciles() >= reconciles, within=within, what=f"{reconciles} reconciles", every=0.05)


def test_a_leader_stopped_with_sigterm_hands_over_without_waiting_for_its_lease(space: Space, start: Start) -> None:
    """A Lease that is not released expires after an hour."""
    terms = ("--lease-seconds", "3600", "--lease-renew-seconds", "1800")
    first = start(*terms)
    wait_leads(first, within=10)
    second = start(*terms)
    assert second.probe("healthz").status_code == 200
    assert not second.leads(), "one that stands by is ready, and does not lead"
    space.serve()
    space.settled()
    assert second.writes() == {}
    assert first.stop() == 0
    wait_leads(second, within=10, reconciles=1)
    assert lease(space)["leaseTransitions"] == 1
    assert second.writes() == {}, "a hand-over changes nothing"
    space.patch("fgd/chat", {"spec": {"replicas": 2}})
    space.wait_pods(2)


def test_a_killed_leader_is_replaced_when_its_lease_expires_and_not_before(space: Space, start: Start) -> None:
    first = start(*SHORT_LEASE)
    wait_leads(first, within=10)
    second = start(*SHORT_LEASE)
    space.apply(resource())
    space.wait_pods(1)
    renewed = wait_renewal(space.server)
    first.kill()
    space.patch("fgd/chat", {"spec": {"replicas": 3}})
    wait_leads(second, within=60)
    assert time.monotonic() - renewed >= LEASE_SECONDS
    space.wait_pods(3)


@pytest.mark.parametrize("point", ["on its way", "answered"])
def test_a_leader_paused_beyond_its_lease_changes_nothing_when_it_resumes(
    point: str, plane: ControlPlane, space: Space, start: Start, tmp_path: Path
) -> None:
    """It is paused in a reconcile, while a write is on its way to the API server or waits for the response."""
    resumed = threading.Event()

    def is_of_the_reconcile(request: Request) -> bool:
        return request.is_write and f"/namespaces/{space.name}/" in request.path

    with Proxy(operator_kubeconfig(plane)) as proxy:
        first = start(*SHORT_LEASE, kubeconfig=proxy.kubeconfig(tmp_path / "kubeconfig"))
        wait_leads(first, within=10)
        second = start(*SHORT_LEASE)

        def pause_before(request: Request) -> Late | None:
            if not is_of_the_reconcile(request):
                return None
            first.pause()
            return Late(resumed)

        def pause_after(request: Request, _: int) -> None:
            if is_of_the_reconcile(request):
                first.pause()

        if point == "answered":
            proxy.before_response = pause_after
        else:
            proxy.rule = pause_before
        space.apply(resource())
        wait_leads(second, within=60)
        proxy.before_response, proxy.rule = lambda *_: None, lambda _: None
        space.complete()
        second.let_resyncs_pass(2)
        versions = space.settled()
        seen = len(proxy.responses)
        first.resume()
        assert first.ending(within=60) == 1
        resumed.set()  # the write that is on its way arrives after the process has ended

        def late() -> list[tuple[str, int]]:
            return [
                (request.path, status) for request, status in proxy.responses[seen:] if is_of_the_reconcile(request)
            ]

        if point == "on its way":
            eventually(late, within=20, what="the response to the write that was held", every=0.1)
        # The check of the lease stops most writes. What passed it before the pause names an old version.
        assert [each for each in late() if each[1] < 400] == []
    assert space.versions() == versions
    assert "no longer the leader" in first.log.read_text()
    assert second.leads()


def test_a_leader_that_cannot_reach_the_api_server_stops_before_its_lease_expires(
    plane: ControlPlane, start: Start, tmp_path: Path
) -> None:
    terms = ("--lease-seconds", "300", "--lease-renew-seconds", "5", "--lease-retry-seconds", "0.5")
    with Proxy(operator_kubeconfig(plane)) as proxy:
        first = start(*terms, kubeconfig=proxy.kubeconfig(tmp_path / "kubeconfig"))
        wait_leads(first, within=10)
        began = time.monotonic()
        proxy.rule = lambda _: Slow(600)
        assert first.ending(within=300) == 1
        assert time.monotonic() - began < 300


def test_a_leader_whose_lease_is_taken_during_a_reconcile_writes_no_more_once_it_knows(
    plane: ControlPlane, space: Space, start: Start, tmp_path: Path
) -> None:
    """Somebody edits the Lease, or deletes it and another candidate is faster."""
    is_writing, is_taken = threading.Event(), threading.Event()

    def hold(request: Request) -> Late | Slow | None:
        if not request.is_write or f"/namespaces/{space.name}/" not in request.path:
            return None
        is_writing.set()
        return Slow(1) if is_taken.is_set() else Late(is_taken)

    with Proxy(operator_kubeconfig(plane)) as proxy:
        operator = start(*SHORT_LEASE, kubeconfig=proxy.kubeconfig(tmp_path / "kubeconfig"))
        wait_leads(operator, within=10)
        proxy.rule = hold
        for number in range(4):
            space.apply(resource(f"chat{number}"))
        assert is_writing.wait(60)
        patch = json.dumps({"spec": {"holderIdentity": "another", "renewTime": "2026-01-01T00:00:00.000000Z"}})
        plane.kubectl("patch", "lease", "fastgen-operator", "-n", SYSTEM, "--type=merge", "--patch", patch)
        known: list[int] = []

        def note(request: Request, _: int) -> None:
            if request.method == "GET" and "/leases/" in request.path and not known:
                known.append(len(proxy.arrivals))

        proxy.before_response = note
        is_taken.set()
        assert operator.ending(within=60) == 1
        late = [request.path for request, _ in proxy.arrivals[known[0] :] if request.is_write]
    # Each of the four reconciles may have checked the leadership before its next write.
    assert len(late) <= 4, late
    assert "another has taken the lease" in operator.log.read_text()


def test_a_stop_waits_for_running_reconciles_and_then_releases_the_lease(
    plane: ControlPlane, space: Space, start: Start, tmp_path: Path
) -> None:
    def slow_deployments(request: Request) -> Slow | None:
        return Slow(2) if request.method == "PATCH" and "/deployments/" in request.path else None

    with Proxy(operator_kubeconfig(plane)) as proxy:
        operator = start(kubeconfig=proxy.kubeconfig(tmp_path / "kubeconfig"))
        wait_leads(operator, within=10)
        proxy.rule = slow_deployments
        space.apply(resource())

        def reconciling() -> bool:
            return any("/deployments/" in request.path and request.is_write for request, _ in proxy.responses)

        eventually(reconciling, within=20, what="a reconcile at its slow write", every=0.02)
        assert operator.stop() == 0, "the reconciles have ended in time"
        written = [request.path for request, status in proxy.responses if request.is_write and status < 300]
    at = next(index for index, path in enumerate(written) if "/deployments/" in path)
    status = next(index for index, path in enumerate(written) if path.endswith("/chat/status"))
    given_back = max(index for index, path in enumerate(written) if "/leases/" in path)
    assert at < status < given_back == len(written) - 1, "the status of the reconcile first, the Lease last"
    assert lease(space)["holderIdentity"] == ""
    assert "Traceback" not in operator.log.read_text()


def test_two_operators_that_disagree_stop_fighting_and_say_so(
    space: Space, plane: ControlPlane, tmp_path: Path
) -> None:
    """Two releases of the chart with other settings, each the leader of its own election, watch the same namespace."""
    arguments = ("--namespace", space.name)
    credentials = operator_kubeconfig(plane)
    operators = [
        OperatorProcess(credentials, tmp_path / f"{image}.log", (*arguments, "--engine-image", f"engine:{image}"))
        for image in ("one", "other")
    ]
    try:
        space.apply(resource())
        began = time.monotonic()
        for operator in operators:
            operator.start()
        condition = space.wait_condition("Ready", "False", "Contended")
        assert "keeps changing metadata.annotations[fastgen.dev/applied] of " in condition["message"]
        generation = space.get("deployment", "chat")["metadata"]["generation"]
        for operator in operators:
            operator.let_resyncs_pass(8)
        # Each restores it five times for free, and then waits for 10, 20, 40 seconds.
        waits = 1 + int(math.log2((time.monotonic() - began) / 10 + 1))
        assert space.get("deployment", "chat")["metadata"]["generation"] - generation <= 2 * (waits + 1)
        assert generation <= 2 * (FREE_RESTORES + 1 + waits)
    finally:
        for operator in operators:
            operator.abandon()
