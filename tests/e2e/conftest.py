"""One cluster with the chart installed for all end-to-end tests, and a namespace per test."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterator

import pytest

from cluster.bed import Bed, close_bed, is_open, open_bed
from cluster.demo import install
from support.deployments import ServedNamespace


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@pytest.fixture(scope="session")
def bed() -> Iterator[Bed]:
    """The cluster of `make up`. It is stopped afterwards unless it was already running."""
    was_open = is_open()
    opened = open_bed(say)
    try:
        install(opened)
        yield opened
    finally:
        if not was_open:
            close_bed(say)


@pytest.fixture
def namespace(bed: Bed, request: pytest.FixtureRequest) -> Iterator[ServedNamespace]:
    """A new namespace that enforces the restricted Pod Security standard."""
    name = "e2e-" + re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:50].strip("-")
    bed.kubectl("create", "namespace", name)
    bed.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    fresh = ServedNamespace(bed, name)
    try:
        yield fresh
    finally:
        if request.node.stash.get(FAILED, False):
            say(fresh.kubectl("get", "fgd,deployments,pods,events", "--output", "wide"))
        # Pods take time to terminate, and the next test does not depend on it.
        bed.kubectl("delete", "namespace", name, "--wait=false")


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record a failure, so that the namespace is printed before its deletion."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report
