"""What `make up` shows while it works."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cluster.programs import progress_bar
from cluster.progress import Progress


def test_each_step_is_numbered_and_a_failed_one_is_not_ticked_off() -> None:
    written = io.StringIO()
    progress = Progress(Console(file=written, width=80), steps=2)
    with progress.step("Start Kubernetes"):
        progress.say("etcd runs")
    with pytest.raises(RuntimeError), progress.step("Install the operator"):
        raise RuntimeError
    begun, said, ended, failed = written.getvalue().splitlines()
    assert begun == "1/2 Start Kubernetes …"
    assert said.endswith(" s  etcd runs")
    assert ended.startswith("✓ 1/2 Start Kubernetes (")
    assert failed == "2/2 Install the operator …"


@pytest.mark.parametrize(("compiled", "filled"), [(0, 0), (1, 0), (50, 5), (99, 9), (100, 10), (120, 10)])
def test_the_bar_of_the_build_is_full_only_when_all_packages_are_compiled(compiled: int, filled: int) -> None:
    bar, _, words = progress_bar(compiled, 100, width=10).partition("] ")
    assert bar == "[" + "#" * filled + "." * (10 - filled)
    assert words == f"{compiled} of at most 100 packages compiled, then linked"
