"""Which tests may run at the same time when `make test` runs two processes."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

# A machine that does other work too is slow now and then; pytest's timeout finds what does not end.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# Groups that start first, the longest in front: the processes then end at about the same time.
FIRST = (
    "node",
    "tests/engine/runner/test_exactness.py",
    "tests/operator/reconcile/test_crashes.py",
    "tests/engine/runner/test_loader.py",
    "tests/operator/runtime/test_two_operators.py",
    "tests/operator/reconcile/test_api_faults.py",
    "tests/operator/reconcile/test_adverse_conditions.py",
    "tests/engine/model/test_transformers_backend.py",
    "tests/engine/kernels/test_instruction_sets.py",
    "tests/engine/server/test_real_engine.py",
)


def group_of(nodeid: str) -> str:
    """Return the group of a test. A group runs in one process, in order."""
    path = nodeid.partition("::")[0]
    if path.startswith("tests/e2e/") or path == "tests/cluster/test_node.py":
        return "node"  # one per machine
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
