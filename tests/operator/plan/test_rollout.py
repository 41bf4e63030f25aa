"""Unblocking of rollouts, and deletion costs before a scale-down."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import DEPLOYMENT, Object
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Plan, make_plan
from fastgen_operator.plan.rollout import max_unavailable
from fastgen_operator.plan.situation import Situation
from fastgen_operator.scale_down.order import DELETION_COST, deletion_costs
from harness.objects import applied, container, leaving, lose, observed, pod, situation, stored

NO_GPU = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu"
TWO = stored(replicas=2, resources={"gpu": {"count": 1}})
CRASHED = container(restarts=5, state={"waiting": {"reason": "CrashLoopBackOff"}})
SERVED = container(started=True, state={"running": {}})


def gated() -> Object:
    found = pod(scheduled="blocked")
    found["status"]["conditions"][-1]["reason"] = "SchedulingGated"
    return found


def room(seen: Observed) -> int:
    return max_unavailable(situation(seen))


ROOM: list[tuple[str, Observed, int]] = [
    ("an old pod that crashes holds the GPU", observed(pod("old", **CRASHED), pod(scheduled=NO_GPU), owner=TWO), 2),
    ("an old pod that crashes holds the quota of Kueue", observed(pod("old", **CRASHED), gated(), owner=TWO), 2),
    ("an old pod that still loads holds it", observed(pod("old", **container()), pod(scheduled=NO_GPU), owner=TWO), 2),
    (
        "a ready one beside it stays",
        observed(
            pod("old", ready=True), pod("old", name="y", **CRASHED), pod(scheduled=NO_GPU), owner=stored(replicas=3)
        ),
        2,
    ),
    ("the new pod has a node", observed(pod("old", **CRASHED), pod(), owner=TWO), 1),
    ("the old pod serves", observed(pod("old", ready=True), pod(scheduled=NO_GPU), owner=TWO), 1),
    ("the old pod stumbles and may hold requests", observed(pod("old", **SERVED), pod(scheduled=NO_GPU), owner=TWO), 1),
    ("the old pod has no node either", observed(pod("old", scheduled=NO_GPU), pod(scheduled=NO_GPU), owner=TWO), 1),
    ("the old pod goes already", observed(leaving(pod("old", **CRASHED)), pod(scheduled=NO_GPU), owner=TWO), 1),
    ("no rollout", observed(pod(**CRASHED), pod(name="y", scheduled=NO_GPU), owner=TWO), 1),
    ("no Deployment", Observed(resource=TWO), 1),
]


@pytest.mark.parametrize(("seen", "expected"), [row[1:] for row in ROOM], ids=[row[0] for row in ROOM])
def test_only_old_pods_that_serve_nothing_raise_max_unavailable(seen: Observed, expected: int) -> None:
    assert room(seen) == expected


def test_a_raised_max_unavailable_is_kept_until_the_controller_has_seen_it() -> None:
    seen = observed(pod("old", **CRASHED), pod(scheduled=NO_GPU), owner=TWO)
    live = copy.deepcopy(seen.deployment.obj)
    assert live is not None
    live["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] = 2
    live["metadata"]["generation"] += 1
    assert room(seen.with_child(DEPLOYMENT, live)) == 2
    live["status"]["observedGeneration"] += 1
    assert room(seen.with_child(DEPLOYMENT, live)) == 2
    assert room(replace(seen, pods=(Pod(pod()),)).with_child(DEPLOYMENT, live)) == 1, "and taken back when all is done"


def test_a_deployment_of_another_owner_is_ignored() -> None:
    seen = observed(pod("old", **CRASHED), pod(scheduled=NO_GPU), owner=TWO)
    foreign = copy.deepcopy(seen.deployment.obj)
    assert foreign is not None
    foreign["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert room(seen.with_child(DEPLOYMENT, foreign)) == 1


def plan_of(seen: Situation) -> Plan:
    return make_plan(seen, Platform("engine:test"))


def fleet(owner: Object | None = None, **loads: float) -> Situation:
    """Return ready pods of these names under a Deployment that was planned with three replicas."""
    owner = owner or stored(replicas=3)
    seen = observed(*(pod(name=name, ready=True) for name in loads), owner=owner)
    (live,) = [
        apply.manifest for apply in plan_of(situation(Observed(resource=owner))).applies if apply.kind == DEPLOYMENT
    ]
    live = {**applied(live, uid="uid-of-deployment", generation=7), "status": {"observedGeneration": 7}}
    tokens = {f"chat-new-{name}": load for name, load in loads.items()}
    return situation(seen.with_child(DEPLOYMENT, live), in_flight_tokens=tokens)


def edited(seen: Situation, **changes: Any) -> Situation:
    """Return the situation after changes of what was observed."""
    return situation(replace(seen.observed, **changes), in_flight_tokens=seen.in_flight_tokens)


def deployed(seen: Situation, live: Object) -> Situation:
    """Return the situation with another Deployment."""
    return edited(seen, children={**seen.observed.children, (DEPLOYMENT, "chat"): live})


def scaled_down(seen: Situation) -> Situation:
    return edited(seen, resource=stored(replicas=1))


def costs(plan: Plan) -> dict[str, str]:
    return {each.pod.name.removeprefix("chat-new-"): each.cost for each in plan.deletion_costs}


def test_before_a_scale_down_the_deletion_cost_is_the_tokens_in_flight() -> None:
    plan = plan_of(scaled_down(fleet(a=700.0, b=0.0, c=12.6)))
    assert costs(plan) == {"a": "700", "c": "13"}, "nothing is the default"
    assert DEPLOYMENT in [apply.kind for apply in plan.applies]


def test_a_new_template_sets_deletion_costs_too_but_a_scale_up_does_not() -> None:
    seen = fleet(a=1.0, b=2.0)
    other = stored(replicas=3, engine={"device": "cpu", "tokenBudget": 512})
    assert costs(plan_of(edited(seen, resource=other))) == {"a": "1", "b": "2"}
    up = plan_of(edited(seen, resource=stored(replicas=5)))
    assert DEPLOYMENT in [apply.kind for apply in up.applies]
    assert up.deletion_costs == ()


def test_a_change_beside_the_template_sets_no_deletion_costs() -> None:
    seen = fleet(a=1.0, b=2.0)
    assert seen.observed.deployment is not None
    live = copy.deepcopy(seen.observed.deployment.obj)
    live["spec"]["template"]["spec"]["schedulerName"] = "default-scheduler"  # as the API server does
    patient = stored(replicas=3, rollout={"progressDeadlineSeconds": 900})
    plan = plan_of(edited(deployed(seen, live), resource=patient))
    assert [apply.why for apply in plan.applies if apply.kind == DEPLOYMENT] == ["updated to the new spec"]
    assert plan.deletion_costs == ()


def test_restoring_the_template_sets_deletion_costs_and_restoring_another_field_does_not() -> None:
    seen = fleet(a=1.0, b=2.0)
    assert seen.observed.deployment is not None
    live = seen.observed.deployment.obj
    template = lose(live, "f:spec", "f:template", "f:spec", "f:terminationGracePeriodSeconds")
    deadline = lose(live, "f:spec", "f:progressDeadlineSeconds")
    assert costs(plan_of(deployed(seen, template))) == {"a": "1", "b": "2"}
    assert costs(plan_of(deployed(seen, deadline))) == {}


def test_no_cost_is_set_in_the_steady_state() -> None:
    assert plan_of(fleet(a=1.0, b=2.0)).deletion_costs == ()


def test_loads_are_read_only_if_pods_are_to_be_removed_and_their_loads_are_unknown() -> None:
    def loads_to_read(seen: Situation) -> list[str]:
        return [pod.name for pod in plan_of(seen).loads_to_read]

    known = fleet(a=1.0, b=2.0)
    unknown = replace(known, in_flight_tokens={})
    other = stored(replicas=3, engine={"device": "cpu", "tokenBudget": 512})
    assert loads_to_read(scaled_down(known)) == loads_to_read(unknown) == []
    assert loads_to_read(edited(unknown, resource=stored(replicas=5))) == []
    assert loads_to_read(scaled_down(unknown)) == ["chat-new-a", "chat-new-b"]
    assert loads_to_read(edited(unknown, resource=other)) == ["chat-new-a", "chat-new-b"]
    unlabelled = edited(scaled_down(unknown), children={})
    assert loads_to_read(unlabelled) == ["chat-new-a", "chat-new-b"], "its Deployment may have lost its label"
    assert plan_of(unlabelled).deletion_costs == ()


def test_an_unchanged_deletion_cost_is_not_written_again() -> None:
    seen = scaled_down(fleet(a=700.0, b=5.0))
    first = {**seen.observed.pods[0].obj}
    first["metadata"] = {**first["metadata"], "annotations": {DELETION_COST: "700"}}
    assert costs(plan_of(edited(seen, pods=(Pod(first), *seen.observed.pods[1:])))) == {"b": "5"}


def test_a_pod_with_unknown_load_counts_as_the_busiest() -> None:
    seen = scaled_down(fleet(a=700.0, b=5.0, c=0.0))
    loads = {name: load for name, load in seen.in_flight_tokens.items() if not name.endswith("-c")}
    assert costs(plan_of(replace(seen, in_flight_tokens=loads))) == {"a": "700", "b": "5", "c": "700"}
    assert deletion_costs(seen.observed.pods, {}) == ()


def test_pods_that_are_deleted_first_anyway_and_single_pods_get_no_cost() -> None:
    seen = fleet(a=9.0, b=8.0)
    others = (Pod(pod(name="unready")), Pod(leaving(pod(name="leaving", ready=True))))
    assert costs(plan_of(scaled_down(edited(seen, pods=(*seen.observed.pods, *others))))) == {"a": "9", "b": "8"}
    assert plan_of(scaled_down(edited(seen, pods=(seen.observed.pods[0], *others)))).deletion_costs == ()


def test_a_change_of_max_unavailable_alone_is_named_as_the_reason() -> None:
    roomy = stored(replicas=3, rollout={"maxSurge": 0, "maxUnavailable": 3})
    narrow = stored(replicas=3, rollout={"maxSurge": 0, "maxUnavailable": 1})
    plan = plan_of(edited(fleet(roomy, a=1.0, b=2.0), resource=narrow))
    whys = [apply.why for apply in plan.applies if apply.kind == DEPLOYMENT]
    assert whys == ["may have 1 pod unavailable from now on (3 before)"]
    assert plan.deletion_costs == ()
