"""Which tests may run beside which, where `make test` runs two at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# What starts first, so that the longest does not end last. The third is short: the process that runs the first holds it
# back until then.
FIRST = ("node", "engine/model/test_exactness.py", "cluster/test_archive.py", "control plane")


# First, because pytest-xdist reads the groups in this same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test its group: a group runs in one process, in order."""
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    if "PYTEST_XDIST_WORKER" in os.environ:
        ranks = {group: rank for rank, group in enumerate(FIRST)}
        items.sort(key=lambda item: ranks.get(groups[item], len(ranks)))


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("cluster"):
        return "node"  # there is one on a machine
    path = item.path.relative_to(HERE)
    if path.parts[0] in ("operator", "chart"):
        return "control plane"  # one is started for all of them
    return str(path)
