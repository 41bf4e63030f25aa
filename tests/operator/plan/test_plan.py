"""Plans: writes with their reasons, and what counts as drift."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from fastgen_operator.api import Spec
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import DEPLOYMENT, SERVICE, Kind, Object
from fastgen_operator.objects.stored import fingerprint
from fastgen_operator.plan.drift import first_lost_field
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Plan, Problem, make_plan, parse_spec
from harness.objects import applied, lose, situation, stored


def plan_of(observed: Observed) -> Plan:
    return make_plan(situation(observed), Platform("engine:test"))


def carried_out(owner: Object) -> Observed:
    """Return the observed resource right after executing its plan."""
    observed = Observed(resource=owner)
    for apply in plan_of(observed).applies:
        observed = observed.with_child(apply.kind, applied(apply.manifest, generation=1))
    return observed


def test_a_new_resource_gets_the_dependencies_of_its_pods_before_its_deployment() -> None:
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
    assert plan_of(carried_out(stored())) == Plan()


def test_an_edit_writes_only_what_it_touches() -> None:
    observed = replace(carried_out(stored()), resource=stored(replicas=3))
    assert [(apply.kind.name, apply.why) for apply in plan_of(observed).applies] == [
        ("Deployment", "scaled from 1 to 3 replicas")
    ]
    observed = replace(carried_out(stored(replicas=3)), resource=stored())
    assert [apply.why for apply in plan_of(observed).applies] == ["scaled from 3 to 1 replica"]


def test_a_new_default_image_of_the_operator_is_rolled_out() -> None:
    observed = carried_out(stored())
    plan = make_plan(situation(observed), Platform("engine:newer"))
    assert [apply.kind.name for apply in plan.applies] == ["Deployment"]


def test_a_foreign_change_is_named_in_the_reason() -> None:
    observed = carried_out(stored())
    assert observed.deployment is not None
    container = ("f:containers", 'k:{"name": "engine"}', "f:args")
    changed = lose(observed.deployment.obj, "f:spec", "f:template", "f:spec", *container)
    (apply,) = plan_of(observed.with_child(DEPLOYMENT, changed)).applies
    assert apply.why == "restored: spec.template.spec.containers[engine].args had been changed"


@pytest.mark.parametrize("kind", [SERVICE, DEPLOYMENT], ids=["service", "deployment"])
def test_a_child_of_another_owner_stops_the_plan(kind: Kind) -> None:
    observed = carried_out(stored())
    foreign = copy.deepcopy(observed.child(kind))
    assert foreign is not None
    foreign["metadata"]["ownerReferences"][0]["uid"] = "an earlier resource of that name"
    plan = plan_of(observed.with_child(kind, foreign))
    assert plan.applies == ()
    assert plan.problem is not None
    assert plan.problem.reason == "NameTaken"


def test_a_child_that_the_spec_no_longer_needs_is_deleted_only_if_it_is_owned() -> None:
    observed = carried_out(stored())
    assert observed.deployment is not None
    left = copy.deepcopy(observed.deployment.obj)
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


OWNED: list[tuple[str, Object, Object, Object, str | None]] = [
    ("a field", {"a": 1}, {"f:a": {}}, {}, None),
    ("another's field", {"a": 1}, {"f:a": {}, "f:b": {}}, {}, None),
    ("a lost field", {"a": 1, "b": 2}, {"f:a": {}}, {}, "b"),
    ("a lost field of a map", {"a": {"b": 1, "c": 1}}, {"f:a": {"f:b": {}}}, {}, "a.c"),
    ("a lost map", {"a": {"b": 1}}, {"f:c": {}}, {}, "a"),
    ("a map as a whole", {"a": {"b": 1}}, {"f:a": {}}, {}, None),
    ("an empty map", {"a": {}}, {"f:a": {}}, {}, None),
    ("a lost empty map", {"a": {}}, {"f:b": {}}, {}, "a"),
    ("a list as a whole", {"a": [{"name": "x"}]}, {"f:a": {}}, {}, None),
    (
        "a list merged by name",
        {"a": [{"name": "x", "v": 1}]},
        {"f:a": {'k:{"name":"x"}': {"f:v": {}, "f:name": {}}}},
        {},
        None,
    ),
    (
        "a lost field of an item",
        {"a": [{"name": "x", "v": 1}]},
        {"f:a": {'k:{"name":"x"}': {"f:name": {}}}},
        {},
        "a[x].v",
    ),
    ("a lost item", {"a": [{"name": "x"}, {"name": "y"}]}, {"f:a": {'k:{"name":"x"}': {"f:name": {}}}}, {}, "a[y]"),
    ("all items lost", {"a": [{"name": "x"}]}, {"f:a": {".": {}}}, {}, "a[]"),
    (
        "a key with a default",
        {"a": [{"port": 1}, {"port": 2, "protocol": "UDP"}]},
        {"f:a": {'k:{"port":2,"protocol":"UDP"}': {}, 'k:{"port":1,"protocol":"TCP"}': {"f:port": {}}}},
        {},
        None,
    ),
    (
        "a lost item with a key with a default",
        {"a": [{"port": 1}, {"port": 2}]},
        {"f:a": {'k:{"port":1,"protocol":"TCP"}': {"f:port": {}}}},
        {},
        "a[2]",
    ),
    (
        "two items that differ in one key",
        {"a": [{"port": 1, "protocol": "UDP"}, {"port": 1, "protocol": "TCP"}]},
        {"f:a": {'k:{"port":1,"protocol":"UDP"}': {"f:port": {}, "f:protocol": {}}}},
        {},
        "a[1]",
    ),
    ("a set", {"a": ["x", "y"]}, {"f:a": {'v:"x"': {}, 'v:"y"': {}}}, {}, None),
    ("a lost value of a set", {"a": ["x", "y"]}, {"f:a": {'v:"x"': {}}}, {}, "a[y]"),
    ("an empty list merged by key", {"a": [], "b": 1}, {"f:b": {}}, {}, None),
    ("a list that was emptied and is not any more", {"a": [], "b": 1}, {"f:b": {}}, {"a": [1]}, "a"),
]


@pytest.mark.parametrize(
    ("manifest", "fields", "live", "path"), [row[1:] for row in OWNED], ids=[row[0] for row in OWNED]
)
def test_drift_is_an_applied_field_that_the_operator_does_not_own_any_more(
    manifest: Object, fields: Object, live: Object, path: str | None
) -> None:
    ours = {"manager": "fastgen-operator", "operation": "Apply", "fieldsV1": {"f:metadata": {}, "f:spec": fields}}
    others = {"manager": "kubectl", "operation": "Apply", "fieldsV1": {}}
    status = {"manager": "fastgen-operator", "operation": "Update", "fieldsV1": {}}
    found = first_lost_field(
        {"apiVersion": "v1", "kind": "K", "metadata": {"name": "n", "namespace": "s"}, "spec": manifest},
        {"metadata": {"managedFields": [others, status, ours]}, "spec": live},
    )
    assert found == (None if path is None else f"spec.{path}")


@pytest.mark.parametrize("entries", [[], [{"manager": "kubectl", "operation": "Apply", "fieldsV1": {}}]])
def test_an_object_without_the_operators_entry_has_drifted(entries: list[Object]) -> None:
    live = {"metadata": {"managedFields": entries}}
    assert first_lost_field({"metadata": {"name": "n"}, "spec": {}}, live) == "metadata.managedFields"


def test_the_fingerprint_depends_on_content_and_not_on_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def count_calls(function: Callable[[], object]) -> int:
    """Return the number of functions that this one calls, also built-in ones."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("of", [lambda owner: Observed(resource=owner), carried_out], ids=["new", "settled"])
def test_a_plan_takes_time_in_proportion_to_the_pod_template(of: Callable[[Object], Observed]) -> None:
    """A tenant may give each container a thousand variables."""

    def cost(variables: int) -> int:
        env = [{"name": f"V{number}", "value": "x"} for number in range(variables)]
        observed = of(stored(podTemplate={"spec": {"containers": [{"name": "engine", "env": env}]}}))
        return count_calls(lambda: plan_of(observed))

    few, many, most = cost(10), cost(100), cost(1000)
    assert most - many < 12 * (many - few)
