"""Lists and watches of a real API server, with the rights of a gateway's ServiceAccount."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.controlplane import ControlPlane
from cluster.programs import ensure_programs
from fastgen_gateway.cluster.api_server import ApiServer, Credentials
from fastgen_gateway.cluster.view import ClusterView
from fastgen_gateway.routing.held_requests import HoldLimits
from fastgen_gateway.routing.router import Router
from fastgen_operator.kinds import FASTGEN
from harness.hostile import deep, manifest
from harness.space import resource, running
from support.waiting import PATIENCE

pytestmark = pytest.mark.controlplane

ROOT = Path(__file__).parents[2]
KEY = ("default", "chat")
RIGHTS: list[dict[str, Any]] = [
    {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "gateway"}},
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "gateway"},
        "rules": [
            {"apiGroups": ["fastgen.dev"], "resources": ["fastgendeployments"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "gateway"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "gateway"},
        "subjects": [{"kind": "ServiceAccount", "name": "gateway", "namespace": "default"}],
    },
]
# A Service as the operator builds it.
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "chat", "labels": {"fastgen.dev/deployment": "chat"}},
    "spec": {
        "selector": {"fastgen.dev/deployment": "chat"},
        "ports": [{"name": "http", "port": 8000, "targetPort": "http"}],
    },
}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane(ensure_programs()) as started:
        started.kubectl("apply", "--server-side", "--filename", str(ROOT / "crds"))
        started.wait_for_crds("fastgendeployments.fastgen.dev")
        # Pods on nodes that do not exist have no endpoints.
        apply(started, *RIGHTS, SERVICE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node"}})
        yield started


@pytest.fixture(scope="module")
def credentials(plane: ControlPlane) -> Credentials:
    token = plane.folder / "gateway.token"
    token.write_text(plane.kubectl("create", "token", "gateway"))
    return Credentials(plane.site.server, token, plane.site.pki / "ca.crt")


def apply(plane: ControlPlane, *objects: dict[str, Any]) -> None:
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    plane.kubectl("apply", "--server-side", "--filename", "-", stdin=items)


def pod(name: str) -> dict[str, Any]:
    container = {"name": "engine", "image": "e", "ports": [{"name": "http", "containerPort": 8000}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"fastgen.dev/deployment": "chat"}},
        "spec": {"containers": [container], "nodeName": "node", "serviceAccountName": "gateway"},
    }


def set_ready(plane: ControlPlane, name: str, address: str, *, ready: bool) -> None:
    status = {**running(ready=ready), "podIP": address, "podIPs": [{"ip": address}]}
    patch = json.dumps({"status": status})
    plane.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", f"--patch={patch}")


@asynccontextmanager
async def reading(credentials: Credentials, failures: list[str]) -> AsyncIterator[Router]:
    router = Router(lambda: 0.0, HoldLimits())
    async with ApiServer(credentials) as server:
        view = ClusterView(server, (), router, lambda: None, failures.append)
        task = asyncio.create_task(view.run())
        try:
            await asyncio.wait_for(view.listed.wait(), PATIENCE * 60)
            yield router
        finally:
            task.cancel()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE * 30):
        while not condition():
            await asyncio.sleep(0.05)


async def test_a_deployment_and_its_ready_pods_are_read_as_they_change(
    plane: ControlPlane, credentials: Credentials
) -> None:
    failures: list[str] = []
    async with reading(credentials, failures) as router:

        def addresses() -> set[str]:
            return {address for key, _, found in router.endpoints() if key == KEY for address in found}

        exposed = resource("chat", gateway={"expose": True})
        await asyncio.to_thread(apply, plane, exposed, pod("chat-1"), pod("chat-2"))
        await until(lambda: router.models.find("chat") is not None)
        for name, address in (("chat-1", "10.9.0.1"), ("chat-2", "10.9.0.2")):
            await asyncio.to_thread(set_ready, plane, name, address, ready=True)
        await until(lambda: addresses() == {"10.9.0.1:8000", "10.9.0.2:8000"})
        await asyncio.to_thread(set_ready, plane, "chat-1", "10.9.0.1", ready=False)
        await until(lambda: addresses() == {"10.9.0.2:8000"})
        # It is deleted once its kubelet says so, and there is none: it stays, terminating.
        await asyncio.to_thread(plane.kubectl, "delete", "pod", "chat-2", "--wait=false")
        await until(lambda: addresses() == set())
        await asyncio.to_thread(apply, plane, resource("chat", gateway={"expose": False}))
        await until(lambda: router.models.find("chat") is None)
        assert failures == []


async def test_deep_and_large_objects_stop_no_other(plane: ControlPlane, credentials: Credentials) -> None:
    """As on a cluster without the chart's admission policy of limits."""
    large = f'"annotations": {{"large": "{"x" * 250_000}"}}, '
    create = ("create", "--raw", FASTGEN.path("default"), "--filename", "-")
    for name, depth, metadata in (("deep", 9000, ""), ("large", 1, large)):
        await asyncio.to_thread(plane.kubectl, *create, stdin=manifest(name, deep(depth), metadata))
    await asyncio.to_thread(apply, plane, resource("good", gateway={"expose": True}))
    failures: list[str] = []
    async with reading(credentials, failures) as router:
        assert router.models.find("good") is not None
        await asyncio.to_thread(plane.kubectl, *create, stdin=manifest("deeper", deep(9000)))
        await asyncio.to_thread(apply, plane, resource("better", gateway={"expose": True}))
        await until(lambda: router.models.find("better") is not None)
        assert failures == []


async def test_without_rights_the_failure_is_counted_and_repeated(
    plane: ControlPlane, credentials: Credentials, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(plane.kubectl("create", "token", "default"))
    failures: list[str] = []
    weak = Credentials(credentials.url, tmp_path / "token", credentials.ca_file)
    listing = asyncio.create_task(list_all(weak, failures))
    await until(lambda: min(map(failures.count, ("FastGenDeployment", "EndpointSlice"))) >= 2)
    assert not listing.done()
    listing.cancel()
    await asyncio.wait({listing})


async def list_all(credentials: Credentials, failures: list[str]) -> None:
    async with reading(credentials, failures):
        pass
