"""Which tests may run at the same time when `make test` runs two processes."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Groups that start first, so that the longest does not end last. The third is short: xdist queues it behind the first.
FIRST = ("node", "tests/engine/runner/test_exactness.py", "tests/cluster/test_archive.py", "control plane")


def group_of(nodeid: str) -> str:
    """Return the group of a test. A group runs in one process, in order."""
    path = nodeid.partition("::")[0]
    if path.startswith("tests/e2e/") or path == "tests/cluster/test_node.py":
        return "node"  # one per machine
    if path.startswith(("tests/operator/", "tests/chart/")):
        return "control plane"  # shared by all of them
    return path


def pytest_report_header() -> str:
    """Return the processor and the matrix product in use; xdist workers print no header."""
    from fastgen.model.processor import describe

    return describe()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest groups first when several processes share the tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        ranks = {group: rank for rank, group in enumerate(FIRST)}
        items.sort(key=lambda item: ranks.get(group_of(item.nodeid), len(ranks)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule whole groups. (pytest-xdist's own marks for this do not work with pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)
