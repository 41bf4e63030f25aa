"""Children without a controller, which the operator adopts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import DEPLOYMENT, JOB, NETWORK_POLICY, SERVICE, Kind, Object
from fastgen_operator.plan.adoption import Adopt
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Plan, make_plan
from harness.objects import UID, applied, manifests, situation, stored

PLATFORM = Platform("engine:test")
OWNER = stored()
OWNER["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
OWN: Object = {"apiVersion": "fastgen.dev/v1alpha1", "kind": "FastGenDeployment", "name": "chat", "uid": UID}
FORMER = {**OWN, "uid": "uid-of-an-earlier-one", "controller": True}
OTHER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat", "uid": "x", "controller": True}
LATER, EARLIER = "2026-01-03T00:00:00Z", "2026-01-01T00:00:00Z"


def children(*references: Object, created: str = EARLIER) -> Observed:
    """Return a resource with all its children, which have these owners."""
    found = {}
    for kind, manifest in manifests(OWNER, PLATFORM):
        live = applied(copy.deepcopy(manifest), uid=f"uid-{kind.name}", resourceVersion="1")
        live["metadata"] |= {"ownerReferences": list(references), "creationTimestamp": created}
        found[kind, live["metadata"]["name"]] = live
    return Observed(OWNER, found)


def plan_of(seen: Observed) -> Plan:
    return make_plan(situation(seen), PLATFORM)


def test_children_without_a_controller_are_adopted_before_anything_else() -> None:
    seen = children()
    plan = plan_of(seen)
    assert {adopt.kind for adopt in plan.adopts} == {kind for kind, _ in seen.children}
    assert plan == Plan(adopts=plan.adopts)
    for adopt in plan.adopts:
        assert adopt.references == ({**OWN, "controller": True, "blockOwnerDeletion": True},)


def test_an_owner_that_is_no_controller_is_kept() -> None:
    shared = {**OTHER, "controller": False}
    (first, *_) = plan_of(children(shared)).adopts
    assert [each["uid"] for each in first.references] == ["x", UID]


def adopted(seen: Observed, **metadata: Any) -> tuple[Adopt, ...]:
    """Return which Service is adopted if its metadata is changed."""
    service = copy.deepcopy(seen.children[SERVICE, "chat"])
    service["metadata"] |= metadata
    only = {key: child for key, child in seen.children.items() if key == (SERVICE, "chat")}
    return plan_of(Observed(OWNER, {**only, (SERVICE, "chat"): service})).adopts


def test_only_what_the_operator_has_created_is_adopted() -> None:
    seen = children()
    labels = seen.children[SERVICE, "chat"]["metadata"]["labels"]
    assert len(adopted(seen)) == 1
    assert adopted(seen, labels={}) == ()
    assert adopted(seen, labels={**labels, "app.kubernetes.io/managed-by": "helm"}) == ()
    assert adopted(seen, labels={**labels, "fastgen.dev/deployment": "other"}) == ()
    assert adopted(seen, deletionTimestamp=LATER) == ()


def test_a_restored_child_of_a_deleted_owner_is_adopted_and_one_left_behind_is_waited_for() -> None:
    (first, *_) = plan_of(children(FORMER, created=LATER)).adopts
    assert [each["uid"] for each in first.references] == [UID]
    plan = plan_of(children(FORMER, created=EARLIER))
    assert plan.adopts == ()
    assert plan.problem is not None
    assert plan.problem.reason == "NameTaken"
    assert "of an earlier FastGenDeployment of that name has not been deleted yet" in plan.problem.message
    assert "delete that" not in plan.problem.message


@pytest.mark.parametrize("created", [EARLIER, LATER])
def test_what_belongs_to_another_controller_stays_taken(created: str) -> None:
    plan = plan_of(children(OTHER, created=created))
    assert plan.adopts == ()
    assert plan.problem is not None
    assert "delete that ServiceAccount" in plan.problem.message


def test_a_deployment_with_another_selector_is_not_adopted() -> None:
    seen = children()
    deployment = copy.deepcopy(seen.children[DEPLOYMENT, "chat"])
    deployment["spec"]["selector"]["matchLabels"]["more"] = "x"
    plan = plan_of(seen.with_child(DEPLOYMENT, deployment))
    assert DEPLOYMENT not in [adopt.kind for adopt in plan.adopts]


def lone(kind: Kind, name: str) -> Object:
    """Return a labelled child without an owner."""
    child = copy.deepcopy(children().children[SERVICE, "chat"])
    return {**child, "kind": kind.name, "metadata": {**child["metadata"], "name": name}}


def test_a_child_that_the_spec_does_not_need_stays_without_an_owner() -> None:
    """Once adopted, it would be deleted. Downloads are: they hold nothing."""
    seen = children().with_child(NETWORK_POLICY, lone(NETWORK_POLICY, "chat.fetch"))
    seen = seen.with_child(JOB, lone(JOB, "chat-fetch-1"))
    names = {adopt.child["metadata"]["name"] for adopt in plan_of(seen).adopts}
    assert names == {"chat", "chat-fetch-1"}
