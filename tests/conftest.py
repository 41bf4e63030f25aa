"""Which tests may run beside which, where `make test` runs two at a time."""

from __future__ import annotations

import os
from typing import Any

import pytest

# What starts first, so that the longest does not end last. The third is short: the process that runs the first holds it
# back until then.
FIRST = ("node", "tests/engine/runner/test_exactness.py", "tests/cluster/test_archive.py", "control plane")


def group_of(nodeid: str) -> str:
    """The group of a test: it runs in one process, in order."""
    path = nodeid.partition("::")[0]
    if path.startswith("tests/e2e/") or path == "tests/cluster/test_node.py":
        return "node"  # there is one on a machine
    if path.startswith(("tests/operator/", "tests/chart/")):
        return "control plane"  # one is started for all of them
    return path


def pytest_report_header() -> str:
    """The processor and the product of the tests' models; the workers of pytest-xdist print no header."""
    from fastgen.model.processor import describe

    return describe()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest groups first where tests are dealt out to several processes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        ranks = {group: rank for rank, group in enumerate(FIRST)}
        items.sort(key=lambda item: ranks.get(group_of(item.nodeid), len(ranks)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out whole groups. (pytest-xdist's own marks for this do not work with pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)
