"""An operator that is newer than the cluster's CRD: the API server drops fields of the status."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.reconcile.older_crd import TRUST, DroppedFields
from harness.process import OperatorProcess
from harness.space import Space
from support.namespace import Object
from support.waiting import eventually

CRD = "fastgendeployments.fastgen.dev"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_dropped_fields_are_named_once_and_left_out_of_the_comparison_until_they_are_tried_again() -> None:
    sent = {"a": 1, "pods": [{"name": "x", "state": "Lost"}, {"name": "y", "state": "Lost"}], "more": {"b": 2}}
    stored = {"a": 1, "pods": [{"name": "x"}, {"name": "y"}]}
    fields = DroppedFields()
    assert fields.kept(sent, NOW) is sent
    assert fields.learn(sent, sent, NOW) == []
    assert fields.learn(sent, stored, NOW) == ["status.more", "status.pods.state"]
    assert fields.kept(sent, NOW) == stored
    assert fields.learn(sent, stored, NOW) == []
    assert fields.kept(sent, NOW + TRUST) is sent, "the CRD may have been upgraded"
    assert fields.learn(sent, stored, NOW + TRUST) == [], "this is said once"
    assert fields.kept(sent, NOW + TRUST + timedelta(seconds=1)) == stored


def test_a_field_that_is_stored_again_is_compared_again_at_once() -> None:
    sent = {"pods": [{"name": "x", "state": "Lost"}], "more": {"b": 2}}
    fields = DroppedFields()
    fields.learn(sent, {"pods": [{"name": "x"}]}, NOW)
    assert fields.learn(sent, {**sent, "pods": [{"name": "x"}]}, NOW) == []
    assert fields.kept(sent, NOW) == {"pods": [{"name": "x"}], "more": {"b": 2}}
    fields.learn(sent, sent, NOW)
    assert fields.kept(sent, NOW) is sent


@pytest.fixture
def upgrade(plane: ControlPlane) -> Iterator[Callable[[], None]]:
    """Remove fields of the status from the CRD; the result puts them back."""

    def replace(crd: Object) -> None:
        crd["metadata"] = {"name": CRD}
        plane.kubectl("patch", "crd", CRD, "--type=merge", f"--patch={json.dumps({'spec': crd['spec']})}")

    present = json.loads(plane.kubectl("get", "crd", CRD, "--output=json"))
    older = copy.deepcopy(present)
    status = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    for name in ("supply", "url"):
        del status[name]
    replace(older)
    try:
        yield lambda: replace(present)
    finally:
        replace(present)


@pytest.mark.controlplane
def test_an_older_crd_causes_no_endless_writes_and_is_named_once_nor_does_its_upgrade(
    space: Space, operator: OperatorProcess, plane: ControlPlane, upgrade: Callable[[], None]
) -> None:
    plane.kubectl("delete", "fgd", "--all", "--all-namespaces")
    operator.restart()
    began = operator.log.stat().st_size

    def names() -> int:
        return operator.log.read_text()[began:].count("OlderCRD: the CRD lacks status.supply, status.url: apply")

    def is_served() -> bool:
        space.serve()
        return "supply" not in space.get("fgd", "chat")["status"]

    # The API server takes a moment to use the changed CRD.
    eventually(is_served, within=40, what="a status without the fields")
    space.patch("fgd/chat", {"spec": {"replicas": 2}})
    space.finish_rollout(count=2)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    settled, writes = space.settled(), operator.writes()
    operator.let_resyncs_pass(4)
    assert operator.writes() == writes
    assert space.versions() == settled
    assert names() == 1
    events = [each["reason"] for each in space.items("events")]
    assert events.count("OlderCRD") == 1
    upgrade()

    def is_stored() -> bool:
        """Return whether the API server stores the fields, after a change of the status."""
        space.patch("fgd/chat", {"spec": {"replicas": 3 - space.get("fgd", "chat")["spec"]["replicas"]}})
        space.finish_rollout(count=space.get("fgd", "chat")["spec"]["replicas"])
        space.wait_condition("Ready", "True", "AllReplicasReady")
        return "supply" in space.get("fgd", "chat")["status"]

    eventually(is_stored, within=60, what="a status with the fields")
    settled, writes = space.settled(), operator.writes()
    operator.let_resyncs_pass(4)
    assert operator.writes() == writes
    assert space.versions() == settled
