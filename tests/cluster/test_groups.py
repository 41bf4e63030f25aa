"""The order in which several processes run the tests."""

from __future__ import annotations

from cluster.images import REPOSITORY
from support.groups import FIRST, NODE, group_of, next_group, rank_of

ENGINE = [f"tests/engine/test_{number}.py" for number in range(4)]
OPERATOR = [f"tests/operator/test_{number}.py" for number in range(3)]


def test_tests_of_the_node_are_one_group_and_others_one_for_each_file() -> None:
    of_node = ("tests/e2e/test_serving.py::test_a", "tests/e2e/test_capacity.py::test_b", "tests/cluster/test_node.py")
    assert {group_of(nodeid) for nodeid in of_node} == {NODE}
    assert group_of("tests/engine/core/test_a.py::test_b[c::d]") == "tests/engine/core/test_a.py"


def test_every_group_that_starts_first_exists() -> None:
    assert [group for group in FIRST if group != NODE and not (REPOSITORY / group).is_file()] == []
    assert len(set(FIRST)) == len(FIRST)


def test_each_process_keeps_to_one_kind_while_there_are_groups_of_it() -> None:
    waiting = sorted([NODE, *ENGINE, *OPERATOR], key=rank_of)
    had: list[list[str]] = [[], [], []]
    for process in (0, 1, 2, 2, 2, 1, 1, 0):
        others = [group for number, groups in enumerate(had) if number != process for group in groups]
        group = next_group(waiting, had[process], others)
        waiting.remove(group)
        had[process].append(group)
    assert waiting == []
    assert had == [[NODE, ENGINE[3]], ENGINE[:3], OPERATOR]
