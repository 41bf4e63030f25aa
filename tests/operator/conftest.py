"""One control plane and one operator with the chart's RBAC for all operator tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from cluster.programs import ensure_programs
from harness.chart import SYSTEM, install, operator_kubeconfig
from harness.process import OperatorProcess
from harness.space import Space
from support.waiting import eventually


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """A control plane with the chart's CRD and RBAC."""
    with ControlPlane(ensure_programs()) as started:
        started.kubectl("create", "namespace", SYSTEM)
        install(started)
        started.wait_for_crds("fastgendeployments.fastgen.dev")
        # kubectl looks kinds up by discovery, which has this one only a little later.
        eventually(
            lambda: "fgd" in started.kubectl("api-resources", "--api-group=fastgen.dev", "--cached=false"),
            within=30,
            what="the CRD in discovery",
        )
        yield started


@pytest.fixture(scope="session")
def _operator(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    process = OperatorProcess(operator_kubeconfig(plane), tmp_path_factory.mktemp("operator") / "log")
    process.log.touch()
    try:
        yield process
    finally:
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text(), f"see {process.log}"


@pytest.fixture
def operator(_operator: OperatorProcess) -> OperatorProcess:
    """The running operator."""
    try:
        if _operator.is_healthy():
            return _operator
    except (AssertionError, RuntimeError):
        pass
    _operator.restart()
    return _operator


@pytest.fixture(scope="module")
def unattended(_operator: OperatorProcess) -> None:
    """Stop the shared operator; the tests of the module start their own."""
    assert _operator.stop() == 0


@pytest.fixture
def own_operator(plane: ControlPlane, space: Space, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator of the test's namespace alone, for modules that use `unattended`."""
    started = OperatorProcess(operator_kubeconfig(plane), tmp_path / "log", ("--namespace", space.name))
    started.start()
    yield started
    started.abandon()


@pytest.fixture
def operators() -> Iterator[list[OperatorProcess]]:
    """Operators that a test starts. They are killed after it."""
    started: list[OperatorProcess] = []
    yield started
    for operator in started:
        operator.abandon()


@pytest.fixture
def space(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A new namespace that enforces the restricted Pod Security standard."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[-50:].strip("-")
    fresh = Space(plane, name)
    fresh.create()
    yield fresh
    fresh.delete()
