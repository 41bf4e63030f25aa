"""Which tests run in one process, and which group of tests a process runs next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NODE = "node"
_NODES = ("tests/cluster/test_node.py", "tests/cluster/test_address_families.py")

# Of each kind, the groups that start first, the longest in front: the processes then end at about the same time.
FIRST = (
    NODE,
    "tests/engine/runner/test_exactness.py",
    "tests/engine/runner/test_loader.py",
    "tests/engine/kernels/test_instruction_sets.py",
    "tests/engine/server/test_real_engine.py",
    "tests/engine/server/test_lifecycle.py",
    "tests/engine/kernels/gpu/test_attention.py",
    "tests/engine/kernels/gpu/test_sampling.py",
    "tests/engine/model/config/test_huggingface_families.py",
    "tests/operator/reconcile/test_hostile_tenant.py",
    "tests/operator/reconcile/test_crashes.py",
    "tests/operator/reconcile/test_api_faults.py",
    "tests/operator/reconcile/test_adverse_conditions.py",
    "tests/operator/autoscale/test_autoscaling.py",
    "tests/operator/plan/test_downloads.py",
    "tests/operator/runtime/test_two_operators.py",
)


def group_of(nodeid: str) -> str:
    """Return the group of a test. A group runs in one process, in order."""
    path = nodeid.partition("::")[0]
    if path.startswith("tests/e2e/") or path in _NODES:
        return NODE  # one per machine
    return path


def kind_of(group: str) -> str:
    """Return what a group mostly does: wait for a node, wait for a control plane, or compute.

    A process starts a control plane for its first test that needs one. Groups of one kind run in one process as long as
    there are any, so one control plane does, and the processor has work while the other processes wait.
    """
    if group == NODE:
        return NODE
    return "operator" if group.startswith(("tests/operator/", "tests/chart/", "tests/gateway/")) else "engine"


def rank_of(group: str) -> int:
    """Return the group's place in `FIRST`, or the same for all others."""
    return FIRST.index(group) if group in FIRST else len(FIRST)


def next_group(waiting: Iterable[str], own: Sequence[str], others: Iterable[str]) -> str:
    """Return the group that a process runs next: one of the kind it has had, then one of a kind that no other has.

    Args:
        waiting: the groups that no process has had, in order.
        own: the groups that this process has had.
        others: the groups that the other processes have had.
    """
    last = kind_of(own[-1]) if own else None
    taken = {kind_of(group) for group in others}
    return min(waiting, key=lambda group: (kind_of(group) != last, kind_of(group) in taken))
