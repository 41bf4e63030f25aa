"""The list of nodes: one for all downloads that start at the same time, also if it fails."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest

from fastgen_operator.kinds import Object
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.reconcile.nodes import TRUST, Nodes
from harness.objects import NOW

NODE: Object = {"metadata": {"name": "n1"}}


class Lists:
    """An API server that answers each list of nodes with the next of these."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def list(self, *_: Any) -> tuple[str, Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, KubeError):
            raise answer
        return "1", iter(answer)


def test_a_list_that_fails_is_repeated_by_none_of_the_workers_that_waited_for_it() -> None:
    lists = Lists(KubeError(504, "timeout"), [NODE])
    nodes = Nodes(cast(KubeClient, lists))
    for _ in range(3):
        with pytest.raises(KubeError, match="timeout"):
            nodes.read(NOW)
    assert len(lists.answers) == 1, "one request"
    later = NOW + TRUST
    assert [node["metadata"]["name"] for node in nodes.read(later)] == ["n1"]
    assert nodes.read(later + timedelta(milliseconds=500)), "no further request"


def test_without_the_right_to_list_nodes_there_are_none() -> None:
    assert Nodes(cast(KubeClient, Lists(KubeError(403, "forbidden")))).read(NOW) == ()
