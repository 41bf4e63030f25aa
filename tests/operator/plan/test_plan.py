"""What has to be written, and why; and what counts as a difference."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from fastgen_operator.api import Spec
from fastgen_operator.children import Platform
from fastgen_operator.digests import fingerprint
from fastgen_operator.kinds import DEPLOYMENT, SERVICE, Kind, Object
from fastgen_operator.plan.drift import first_difference
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Plan, Problem, make_plan, parse_spec
from harness.objects import spec_of, stored


def plan_of(observed: Observed) -> Plan:
    return make_plan(spec_of(observed.resource), observed, Platform("engine:test"))


def applied(owner: Object) -> Observed:
    """The observed right after the plan for the resource was carried out."""
    observed = Observed(resource=owner)
    for apply in plan_of(observed).applies:
        live = copy.deepcopy(apply.manifest)
        live["metadata"]["generation"] = 1
        observed = observed.with_child(apply.kind, live)
    return observed


def test_a_new_resource_gets_what_its_pods_begin_with_and_then_its_deployment() -> None:
    plan = plan_of(Observed(resource=stored()))
    assert [apply.kind.name for apply in plan.applies] == [
        "ServiceAccount",
        "Service",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Deployment",
    ]
    assert {apply.why for apply in plan.applies} == {"created"}
    assert plan.problem is None


def test_what_was_applied_is_not_applied_again() -> None:
    assert plan_of(applied(stored())) == Plan()


def test_an_edit_writes_only_what_it_touches() -> None:
    observed = replace(applied(stored()), resource=stored(replicas=3))
    assert [(apply.kind.name, apply.why) for apply in plan_of(observed).applies] == [
        ("Deployment", "scaled from 1 to 3 replicas")
    ]


def test_a_new_default_image_of_the_operator_is_rolled_out() -> None:
    observed = applied(stored())
    plan = make_plan(spec_of(observed.resource), observed, Platform("engine:newer"))
    assert [apply.kind.name for apply in plan.applies] == ["Deployment"]


def test_a_foreign_change_is_named_in_the_reason() -> None:
    observed = applied(stored())
    assert observed.deployment is not None
    observed.deployment["spec"]["template"]["spec"]["containers"][0]["args"][3] = "127.0.0.1"
    (apply,) = plan_of(observed).applies
    assert apply.why == "restored: spec.template.spec.containers[engine].args[3] had been changed"


@pytest.mark.parametrize("kind", [SERVICE, DEPLOYMENT], ids=["service", "deployment"])
def test_a_child_of_another_owner_stops_the_plan(kind: Kind) -> None:
    observed = applied(stored())
    foreign = copy.deepcopy(observed.child(kind))
    assert foreign is not None
    foreign["metadata"]["ownerReferences"][0]["uid"] = "an earlier resource of that name"
    plan = plan_of(observed.with_child(kind, foreign))
    assert plan.applies == ()
    assert plan.problem is not None
    assert plan.problem.reason == "NameTaken"


def test_a_child_that_the_spec_does_not_ask_for_any_more_is_deleted_and_only_if_it_is_ours() -> None:
    observed = applied(stored())
    assert observed.deployment is not None
    left = copy.deepcopy(observed.deployment)
    left["metadata"]["name"] = "chat-left"
    plan = plan_of(observed.with_child(DEPLOYMENT, left))
    assert [(delete.kind, delete.child["metadata"]["name"]) for delete in plan.deletes] == [(DEPLOYMENT, "chat-left")]
    left["metadata"]["ownerReferences"][0]["uid"] = "an earlier resource of that name"
    assert plan_of(observed.with_child(DEPLOYMENT, left)) == Plan()


def test_a_spec_of_another_version_is_a_problem_that_names_the_field() -> None:
    problem = parse_spec(stored(engine={"device": "quantum"}))
    assert isinstance(problem, Problem)
    assert problem.reason == "InvalidSpec"
    assert problem.message.startswith("spec.engine.device: ")
    assert isinstance(parse_spec(stored()), Spec)


def _in_template(spec: Object) -> Object:
    return {"spec": {"template": {"spec": spec}}}


DIFFERENCES: list[tuple[Any, Any, str | None]] = [
    ({"a": 1}, {"a": 1, "b": 2}, None),
    ({"a": 1}, {"a": 2}, "a"),
    ({"a": 1}, {}, "a"),
    ({"a": {}}, {"a": {}}, None),
    ({"a": {}}, {}, "a"),
    ({"a": {"b": 1}}, {"a": 1}, "a"),
    ({"a": [1, 2]}, {"a": [1, 2]}, None),
    ({"a": [1, 2]}, {"a": [2, 1]}, "a[0]"),
    ({"a": [1]}, {"a": [1, 2]}, "a"),
    ({"a": [1]}, {"a": None}, "a"),
    ({"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "injected"}, {"name": "x", "v": 1}]}, None),
    ({"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "x", "v": 2}]}, "a[x].v"),
    ({"a": [{"name": "x"}]}, {"a": []}, "a[x]"),
    ({"limits": {"cpu": "0.5"}}, {"limits": {"cpu": "500m"}}, None),
    ({"limits": {"cpu": "0.5"}}, {"limits": {"cpu": "501m"}}, "limits.cpu"),
    ({"requests": {"memory": "1024Mi"}}, {"requests": {"memory": "1Gi"}}, None),
    ({"requests": {"memory": "1Gi"}}, {"requests": {}}, "requests.memory"),
    ({"requests": {"memory": "1Gi"}}, {"requests": {"memory": "broken"}}, "requests.memory"),
    ({"replicas": "1"}, {"replicas": 1}, "replicas"),
    (_in_template({"tty": False, "nodeSelector": {}, "tolerations": [], "subPath": ""}), _in_template({}), None),
    (_in_template({"tty": False}), _in_template({"tty": True}), "spec.template.spec.tty"),
    (_in_template({"tty": True}), _in_template({}), "spec.template.spec.tty"),
    (_in_template({"privileged": False}), _in_template({}), "spec.template.spec.privileged"),
    ({"podSelector": {}}, {}, "podSelector"),
    ({"ports": [{"port": 53, "p": "U"}, {"port": 53, "p": "T"}]}, {"ports": [{"port": 53, "p": "U"}]}, "ports"),
    ({"spec": {"ingress": [{"a": 1}]}}, {"spec": {"ingress": [{"a": 1}, {}]}}, "spec.ingress"),
    ({"spec": {"ingress": [{"port": 1}]}}, {"spec": {"ingress": [{"port": 1, "b": 2}]}}, "spec.ingress[0]"),
    ({"spec": {"selector": {"a": "b"}}}, {"spec": {"selector": {"a": "b", "c": "d"}}}, "spec.selector"),
]


@pytest.mark.parametrize(("wanted", "live", "path"), DIFFERENCES)
def test_a_difference_is_a_wanted_field_held_otherwise(wanted: Any, live: Any, path: str | None) -> None:
    assert first_difference(wanted, live) == path


def test_the_fingerprint_depends_on_content_and_not_on_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
