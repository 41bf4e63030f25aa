"""One gateway pod for all tests, in front of stand-ins for the API server and the replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.gateway_pod import GatewayPod
from gateway.stand_ins import ApiServerStandIn, LoopThread, ReplicaStandIn
from support.waiting import wait_until


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def _api(loop: LoopThread) -> Iterator[ApiServerStandIn]:
    server = ApiServerStandIn(loop)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def _pod(_api: ApiServerStandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayPod]:
    started = GatewayPod(tmp_path_factory.mktemp("gateway"), _api.url)
    started.start()
    yield started
    started.stop()
    assert "Traceback" not in started.picker_log, started.picker_log


@pytest.fixture
def api(_api: ApiServerStandIn) -> Iterator[ApiServerStandIn]:
    """The API server's stand-in, empty."""
    yield _api
    _api.status = 200
    _api.clear()


@pytest.fixture
def pod(_pod: GatewayPod, api: ApiServerStandIn) -> GatewayPod:
    """The running gateway, without models."""
    wait_until(lambda: not _pod.demand()["deployments"], "the models of the test before are gone")
    del api
    return _pod


@pytest.fixture
def replicas(loop: LoopThread) -> Iterator[tuple[ReplicaStandIn, ReplicaStandIn]]:
    """Two replicas, a and b."""
    pair = ReplicaStandIn(loop, "a"), ReplicaStandIn(loop, "b")
    yield pair
    for replica in pair:
        replica.stop()
