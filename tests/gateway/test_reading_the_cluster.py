"""Lists and watches of the API server, against a stand-in."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fastgen_gateway.cluster import api_server
from fastgen_gateway.cluster.api_server import ApiServer, Credentials
from fastgen_gateway.cluster.objects import endpoints, exposed
from fastgen_gateway.cluster.view import ClusterView
from fastgen_gateway.routing.held_requests import HoldLimits
from fastgen_gateway.routing.model_table import Exposed
from fastgen_gateway.routing.request_body import RequestBody
from fastgen_gateway.routing.router import Choice, Router
from gateway.stand_ins import ApiServerStandIn, LoopThread
from harness.hostile import deep
from support.waiting import PATIENCE

KEY = ("default", "m")


@pytest.fixture
def api(loop: LoopThread) -> Iterator[ApiServerStandIn]:
    """A stand-in that no other picker reads."""
    server = ApiServerStandIn(loop)
    yield server
    server.stop()


class Reader:
    """A router that reads a cluster."""

    def __init__(self) -> None:
        self.router = Router(lambda: 0.0, HoldLimits())
        self.failures: list[str] = []
        self.num_changes = 0

    @property
    def endpoints(self) -> dict[tuple[str, str], set[str]]:
        return {key: set(addresses) for key, _, addresses in self.router.endpoints()}

    def note_change(self) -> None:
        self.num_changes += 1


@asynccontextmanager
async def reading(api: ApiServerStandIn, *namespaces: str) -> AsyncIterator[Reader]:
    reader = Reader()
    async with ApiServer(Credentials(api.url)) as server:
        view = ClusterView(server, namespaces, reader.router, reader.note_change, reader.failures.append)
        task = asyncio.create_task(view.run())
        try:
            await asyncio.wait_for(view.listed.wait(), PATIENCE * 20)
            yield reader
        finally:
            task.cancel()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE * 20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_what_exists_and_what_changes_is_read(api: ApiServerStandIn) -> None:
    api.deployment("m")
    api.endpoints("m", "127.0.0.1:1001")
    async with reading(api) as reader:
        assert reader.endpoints == {KEY: {"127.0.0.1:1001"}}
        await asyncio.to_thread(api.deployment, "other", "space", "n")
        await until(lambda: reader.router.models.find("n") is not None)
        await asyncio.to_thread(api.endpoints, "m", "127.0.0.1:1002", leaving=("127.0.0.1:1001",))
        await until(lambda: reader.endpoints[KEY] == {"127.0.0.1:1002"})
        await asyncio.to_thread(api.clear)
        await until(lambda: reader.endpoints == {})
        assert reader.failures == []


async def test_the_replicas_and_the_share_of_a_canary_are_read_as_they_change(api: ApiServerStandIn) -> None:
    api.deployment("m", canary_percent=50)
    api.endpoints("m", "127.0.0.1:1001")
    api.endpoints("m-canary", "127.0.0.1:1002", owner="m")
    async with reading(api) as reader:
        assert reader.endpoints == {KEY: {"127.0.0.1:1001", "127.0.0.1:1002"}}

        def sent_to() -> list[str]:
            found = [reader.router.arrive(RequestBody("m", 1, 1, ())) for _ in range(4)]
            return [each.address[-4:] for each in found if isinstance(each, Choice)]

        assert sent_to() == ["1001", "1002"] * 2
        await asyncio.to_thread(api.deployment, "m", canary_percent=100)
        await until(lambda: sent_to() == ["1002"] * 4)
        await asyncio.to_thread(api.deployment, "m")
        await until(lambda: sent_to() == ["1001"] * 4)
        await asyncio.to_thread(api.endpoints, "m-canary", owner="m")
        await until(lambda: reader.endpoints == {KEY: {"127.0.0.1:1001"}})


async def test_a_deployment_with_the_name_of_a_canary_is_none(api: ApiServerStandIn) -> None:
    api.deployment("m-canary")
    api.endpoints("m-canary", "127.0.0.1:1001")
    async with reading(api) as reader:
        assert reader.endpoints == {("default", "m-canary"): {"127.0.0.1:1001"}}
        assert isinstance(reader.router.arrive(RequestBody("m-canary", 1, 1, ())), Choice)


async def test_many_changes_of_many_deployments_leave_time_for_requests(
    api: ApiServerStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update takes the longer, the more deployments there are; one namespace could cause one after the other."""
    async with reading(api) as reader:
        update = reader.router.set_deployments

        def slow(deployments: Iterable[Exposed]) -> None:
            time.sleep(0.02)
            update(deployments)

        monkeypatch.setattr(reader.router, "set_deployments", slow)
        began, before = time.monotonic(), reader.num_changes

        def change() -> None:
            for number in range(100):
                api.deployment(f"m{number}")

        await asyncio.to_thread(change)
        await until(lambda: len(reader.endpoints) == 100)
        # Each is followed by nine times as long without one.
        assert reader.num_changes - before <= (time.monotonic() - began) / 0.19 + 2


async def test_an_expired_version_is_listed_again(api: ApiServerStandIn) -> None:
    api.deployment("m")
    async with reading(api) as reader:
        lists = api.num_lists()
        await asyncio.to_thread(api.expire)
        await asyncio.to_thread(api.deployment, "other")
        await until(lambda: reader.router.models.find("other") is not None)
        assert api.num_lists() == lists + 1
        await until(lambda: len(reader.failures) >= 2)  # the watch of EndpointSlices may hear of it later
        assert sorted(reader.failures) == ["EndpointSlice", "FastGenDeployment"]


async def test_a_watch_that_ends_goes_on_without_a_list(api: ApiServerStandIn) -> None:
    api.deployment("m")
    async with reading(api) as reader:
        lists = api.num_lists()
        await asyncio.to_thread(api.end_watches)
        await asyncio.to_thread(api.deployment, "other")
        await until(lambda: reader.router.models.find("other") is not None)
        assert api.num_lists() == lists
        assert reader.failures == []


@pytest.mark.parametrize("fault", ["stopped", "rejecting"])
async def test_what_was_read_stays_while_the_api_server_is_away(api: ApiServerStandIn, fault: str) -> None:
    api.deployment("m")
    api.endpoints("m", "127.0.0.1:1001")
    async with reading(api) as reader:
        if fault == "stopped":
            await asyncio.to_thread(api.stop)
        else:
            api.status = 500
            await asyncio.to_thread(api.end_watches)
        await until(lambda: len(reader.failures) >= 4)
        assert reader.endpoints == {KEY: {"127.0.0.1:1001"}}
        api.status = 200
        if fault == "stopped":
            await asyncio.to_thread(api.start)
        await asyncio.to_thread(api.deployment, "other")
        await until(lambda: reader.router.models.find("other") is not None)


@pytest.mark.parametrize(
    "faulty",
    [
        {},
        {"metadata": {"namespace": "default", "name": "faulty"}},
        {"metadata": {"namespace": "default", "name": "faulty"}, "spec": {"gateway": 3}},
        {"metadata": {"namespace": "default", "name": "faulty"}, "spec": None},
    ],
)
async def test_a_faulty_object_stops_no_other(api: ApiServerStandIn, faulty: dict[str, Any]) -> None:
    api.deployment("m")
    async with reading(api) as reader:
        await asyncio.to_thread(api.send_faulty, "fastgendeployments", faulty)
        await asyncio.to_thread(api.deployment, "other")
        await until(lambda: reader.router.models.find("other") is not None)
        assert reader.router.models.find("m") is not None


async def test_a_faulty_object_in_a_list_stops_no_other(api: ApiServerStandIn) -> None:
    api.put("fastgendeployments", "default", "faulty", {"spec": {"gateway": {"expose": True}}})
    api.deployment("m")
    async with reading(api) as reader:
        assert [*reader.router.models.names()] == ["m"]


async def test_an_object_of_any_depth_stops_no_other(api: ApiServerStandIn) -> None:
    """A tenant may nest spec.podTemplate deeper than decoders recurse."""
    api.deep = deep(9000)
    hostile = {"spec": {"model": {}, "gateway": {"expose": True}, "podTemplate": "DEEP"}}
    api.put("fastgendeployments", "space", "listed", hostile, creationTimestamp="2026-01-01T00:00:00Z")
    api.deployment("m")
    async with reading(api) as reader:
        assert sorted(reader.router.models.names()) == ["listed", "m"]
        await asyncio.to_thread(
            api.put, "fastgendeployments", "space", "watched", hostile, creationTimestamp="2026-01-01T00:00:00Z"
        )
        await asyncio.to_thread(api.deployment, "other")
        await until(lambda: reader.router.models.find("other") is not None)
        assert sorted(reader.router.models.names()) == ["listed", "m", "other", "watched"]
        assert reader.failures == []


async def test_an_api_server_too_slow_for_a_page_is_asked_for_a_smaller_one(
    api: ApiServerStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "_LIST_SECONDS", 2.0)
    api.most_objects = 5
    api.deployment("m")
    async with reading(api) as reader:
        assert [*reader.router.models.names()] == ["m"]
        assert {*reader.failures} == {"EndpointSlice", "FastGenDeployment"}, "the first list of each kind failed"
        assert len(api.too_long) == len({*api.too_long}) == 2, "no further one was as long"


async def test_a_list_of_large_objects_is_read_in_pages(api: ApiServerStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may create many objects of more than a megabyte."""
    monkeypatch.setattr(api_server, "_LIST_SECONDS", 600.0)
    for number in range(60):
        annotations = {"large": "x" * 1_250_000}
        api.put("fastgendeployments", "space", f"large-{number:02d}", {"spec": {"model": {}}}, annotations=annotations)
    api.deployment("m")
    async with reading(api) as reader:
        assert [*reader.router.models.names()] == ["m"]
        assert reader.failures == []


async def test_a_changed_status_is_no_change(api: ApiServerStandIn) -> None:
    """Otherwise each write of a tenant would sort all models anew."""
    api.deployment("m")
    async with reading(api) as reader:
        before = reader.num_changes
        content = {"spec": {"model": {}, "gateway": {"expose": True}}, "status": {"replicas": 1}}
        put = functools.partial(api.put, "fastgendeployments", "default", "m", content)
        await asyncio.to_thread(put, creationTimestamp="2026-01-01T00:00:00Z")
        await asyncio.to_thread(api.deployment, "other")
        await until(lambda: reader.router.models.find("other") is not None)
        assert reader.num_changes == before + 1


def slice_of(*conditions: dict[str, object], **content: object) -> dict[str, Any]:
    found = [{"addresses": [f"10.0.0.{number}"], "conditions": each} for number, each in enumerate(conditions, 1)]
    labels = {"kubernetes.io/service-name": "m"}
    ports = [{"name": "metrics", "port": 1}, {"name": "http", "port": 8000}]
    return {
        "metadata": {"namespace": "default", "labels": labels},
        "addressType": "IPv4", "endpoints": found, "ports": ports, **content,
    }  # fmt: skip


def test_only_ready_endpoints_get_requests() -> None:
    found = endpoints(slice_of({"ready": True}, {"ready": False}, {"ready": True, "terminating": True}, {}))
    assert found is not None
    assert found.deployment == KEY
    assert sorted(found.addresses.values()) == ["10.0.0.1:8000", "10.0.0.4:8000"]


def test_an_endpoint_of_ipv6_has_brackets() -> None:
    found = endpoints(slice_of(addressType="IPv6", endpoints=[{"addresses": ["fd00::1"]}]))
    assert found is not None
    assert [*found.addresses.values()] == ["[fd00::1]:8000"]


def test_a_slice_without_a_service_or_port_has_no_endpoints() -> None:
    assert endpoints({"metadata": {"namespace": "default"}}) is None
    assert endpoints(slice_of(addressType="FQDN")) is None
    found = endpoints(slice_of({"ready": True}, ports=None))
    assert found is not None
    assert found.addresses == {}


def put_slice(api: ApiServerStandIn, name: str, *addresses: str) -> None:
    content = {
        "endpoints": [{"addresses": [each], "targetRef": {"uid": f"pod-{each[-1]}"}} for each in addresses],
        "ports": [{"name": "http", "port": 8000}],
    }
    api.put("endpointslices", "default", name, content, labels={"kubernetes.io/service-name": "m"})


async def test_a_pod_with_addresses_of_both_families_is_one_replica(api: ApiServerStandIn) -> None:
    api.deployment("m")
    put_slice(api, "m-4", "10.0.0.1")
    put_slice(api, "m-6", "fd00::1")
    async with reading(api) as reader:
        assert reader.endpoints == {KEY: {"10.0.0.1:8000"}}
        await asyncio.to_thread(put_slice, api, "m-4", "10.0.0.1", "10.0.0.2")
        await until(lambda: len(reader.endpoints[KEY]) == 2)
        assert reader.endpoints == {KEY: {"10.0.0.1:8000", "10.0.0.2:8000"}}, "it keeps its address"


def test_a_resource_that_is_not_exposed_or_being_deleted_is_not_served() -> None:
    metadata = {"namespace": "default", "name": "m", "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec: dict[str, Any] = {"model": {}, "gateway": {"expose": True}}
    found = exposed({"metadata": metadata, "spec": spec})
    assert found is not None
    assert (found.key, found.model) == (KEY, "m")
    assert found.canary_percent == 0
    tried = exposed({"metadata": metadata, "spec": spec, "status": {"canary": {"percent": 20}}})
    assert tried is not None
    assert tried.canary_percent == 20
    assert exposed({"metadata": metadata, "spec": {"model": {}}}) is None
    assert exposed({"metadata": metadata, "spec": {"model": {}, "gateway": {"expose": False}}}) is None
    assert exposed({"metadata": {**metadata, "deletionTimestamp": "x"}, "spec": spec}) is None


async def test_only_the_chosen_namespaces_are_read(api: ApiServerStandIn) -> None:
    async with reading(api, "one", "two"):
        assert {path.split("/")[-2] for path in api.paths} == {"one", "two"}
        assert {path.split("/")[2] for path in api.paths} == {"fastgen.dev", "discovery.k8s.io"}
