"""The order of the tests when `make test` runs several processes; see `support.groups`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import hypothesis
import pytest

from support.groups import group_of, next_group, rank_of

# A machine that does other work too is slow now and then; pytest's timeout finds what does not end.
# The suite draws the same examples in every run; `make fuzz` draws others, and more.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("suite")


# A shell ignores SIGINT for what it starts in the background, and each program that a test starts would do so too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Return the processor and the matrix product in use; xdist workers print no header."""
    from fastgen.model.processor import describe_processor

    return describe_processor()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes, put the longest groups first, and tests of images last, which take long to build."""

    def place(item: pytest.Item) -> tuple[int, bool]:
        return rank_of(group_of(item.nodeid)), item.get_closest_marker("image") is not None

    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=place)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a run that is ended before its summary would not say what failed.

    A test whose process crashed has a report too, made by xdist.
    """
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        reason = report.longreprtext.strip().rpartition("\n")[2]
        print(f"\nFAILED {report.nodeid} ({report.when}): {reason}", file=sys.__stdout__, flush=True)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule whole groups. (pytest-xdist's own marks for this do not work with pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            others = (group for other, groups in self.assigned_work.items() if other is not node for group in groups)
            group = next_group(self.workqueue, list(self.assigned_work[node]), others)
            self.workqueue.move_to_end(group, last=False)
            super()._assign_work_unit(node)

    return GroupScheduling(config, log)
