"""One cluster with the chart installed for all end-to-end tests, and a namespace per test."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from cluster.bed import Bed, close_bed, is_open, open_bed
from cluster.demo import RELEASE, SYSTEM, gateway_flags, install
from cluster.endpoint import service_url
from support.deployments import ServedNamespace, manifest

# Files whose tests need more than a kubeconfig of the cluster, and for what.
ON_THE_NODE = {
    "test_canary.py": "runs this machine's Envoy in a stand-in image, and slows and kills replicas through cgroups",
    "test_autoscaling.py": "slows and stops replicas through cgroups",
    "test_gateway.py": "runs this machine's Envoy in a stand-in image",
    "test_model_cache.py": "serves a hub on this machine",
    "test_model_families.py": "serves a hub on this machine",
    "test_operator_faults.py": "stops the operator through cgroups",
    "test_simulated_gpu.py": "simulates GPUs in the stand-in image",
    "test_upgrade.py": "loads images of the previous release",
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Bed]:
    """The cluster of `make up`. Unless it was already running, it is removed before tests of other folders run."""
    was_open = is_open()
    opened = open_bed(say)
    try:
        install(opened)
        yield opened
    finally:
        if not was_open:
            close_bed(say)


@pytest.fixture(scope="package")
def of_a_kubeconfig(cluster: Bed) -> Bed:
    """The same cluster through FASTGEN_KUBECONFIG, as anybody's: images are only named, and ports are forwarded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FASTGEN_KUBECONFIG", str(cluster.kubeconfig))
        patched.setenv("FASTGEN_ENGINE_IMAGE", cluster.engine_image)
        patched.setenv("FASTGEN_OPERATOR_IMAGE", cluster.operator_image)
        return open_bed(say)


@pytest.fixture(scope="module")
def bed(cluster: Bed, of_a_kubeconfig: Bed, request: pytest.FixtureRequest) -> Bed:
    """The cluster as the tests of a module reach it."""
    return cluster if request.path.name in ON_THE_NODE else of_a_kubeconfig


@pytest.fixture(scope="module")
def gateway(bed: Bed) -> Iterator[str]:
    """The URL of the gateway, which is removed afterwards."""
    install(bed, RELEASE, "--set=gateway.drainSeconds=30", *gateway_flags(bed, say))
    with service_url(bed, SYSTEM, "fastgen-gateway", 80) as url:
        yield url
    install(bed)


@pytest.fixture(scope="package", autouse=True)
def engine_image(cluster: Bed, request: pytest.FixtureRequest) -> Iterator[Future[str] | None]:
    """The name of the engine's real image, which is built while tests that need no processor run before its own."""

    def build() -> str:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        return cluster.build_image("engine", {"DEMO": "1"})

    wanted = any(item.get_closest_marker("image") for item in request.session.items)
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(build) if wanted else None


@contextmanager
def new_namespace(bed: Bed, node: pytest.Item | pytest.Collector) -> Iterator[ServedNamespace]:
    """Create a namespace and delete it; print its objects if one of the tests in it failed."""
    made = ServedNamespace(bed, "e2e-" + re.sub(r"[^a-z0-9]+", "-", node.name.lower())[:50].strip("-"))
    made.create()
    try:
        yield made
    finally:
        if node.stash.get(FAILED, False):
            say(made.kubectl("get", "fgd,deployments,pods,events", "--output", "wide"))
        made.delete()


@pytest.fixture
def namespace(bed: Bed, request: pytest.FixtureRequest) -> Iterator[ServedNamespace]:
    """A new namespace for one test."""
    with new_namespace(bed, request.node) as made:
        yield made


@pytest.fixture(scope="module")
def served(bed: Bed, request: pytest.FixtureRequest) -> Iterator[ServedNamespace]:
    """A namespace with the resource `chat`, shared by the tests of a module. Each test leaves it with one replica."""
    with new_namespace(bed, request.node) as made:
        made.apply(manifest("chat"))
        yield made


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record a failure, so that the namespace is printed before its deletion."""
    report = yield
    if report.failed:
        for node in item.listchain():
            node.stash[FAILED] = True
    return report
