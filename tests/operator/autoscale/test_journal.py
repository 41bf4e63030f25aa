"""A recorded decision can be repeated from its inputs, in another process, and after conversion to JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest

from fastgen_operator.api.autoscaling import ScaleDown, ScaleUp, ScalingPolicy
from fastgen_operator.autoscale.decide import Case, decide
from fastgen_operator.autoscale.journal import Entry, Journal, journal_from_json, to_json
from fastgen_operator.autoscale.rules import headroom, needs
from fastgen_operator.autoscale.rules.rate_limits import RateLimits, Scaling
from fastgen_operator.autoscale.rules.recommend import State
from fastgen_operator.autoscale.rules.schedules import Floor
from fastgen_operator.plugin.arithmetic import Replay, steps_of
from fastgen_operator.runtime.http_servers import decision_server
from harness.fluid import FluidFleet, policy
from harness.process import client

LIMITS = RateLimits(
    ScaleUp(policies=[ScalingPolicy(type="Pods", value=1, period_seconds=60)], select_policy="Min"), ScaleDown()
)


@cache
def cases() -> tuple[Case, ...]:
    """Decisions of fleets that grow, shrink, hold and wait, with each input that a decision can have."""
    rules = replace(policy(), derives_utilization=True, down_window=60.0)
    fleet = FluidFleet.of(2, rules, lambda time: 5.0 if 300 <= time < 500 else 1.0)

    def now(**changes: Any) -> Case:
        return replace(Case(policy=rules, fleet=fleet.observed(), now=fleet.time + 1 / 3, state=fleet.state), **changes)

    found = [now()]
    for seconds in (5, 305, 100, 120, 300):
        fleet.run(seconds)
        found.append(now())
    office = Floor("office", 40, None)
    empty = replace(fleet.observed(), ready=frozenset(), samples={})
    return (
        *found,
        now(is_dry_run=True),
        now(floor=office),
        now(rate_limits=LIMITS, state=replace(fleet.state, scalings=(Scaling(fleet.time - 9, 1),)), floor=office),
        now(fleet=empty),
        now(state=State()),
    )


def recorded(case: Case) -> Journal:
    """Return the journal of one decision as the plugin receives it."""
    journal = Journal().add(Entry(1.7e9, case, decide(case)[0]))
    return journal_from_json(json.loads(json.dumps(to_json(journal), allow_nan=False)))


def test_every_kind_of_decision_is_repeated_exactly_and_explained() -> None:
    reasons = set()
    for case in cases():
        journal = recorded(case)
        assert journal.latest is not None
        assert journal.latest.case == case
        assert journal.latest.decision == decide(case)[0]
        replay = Replay.of(journal.latest)
        assert replay.is_equal
        steps = {title: " ".join(lines) for title, lines in steps_of(replay).items()}
        decision = replay.decision
        assert steps["result"].startswith(f"{decision.replicas} replica")
        if decision.sizing is not None:
            assert f"= {decision.sizing.required:.2f} replicas" in steps["utilization"]
        for said in (decision.hold, decision.limit, decision.change):
            if said is not None:
                assert said.message in " ".join(steps.values())
                reasons.add(said.reason)
    assert reasons >= {"DemandJumped", "DemandFell", "ScheduleStarted", "NoReadyReplicas"}


@pytest.mark.parametrize(("module", "name", "value"), [(headroom, "DEVIATIONS", 1.2), (needs, "KV_SHARE", 0.001)])
def test_the_replay_of_another_policy_differs(
    module: object, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = recorded(cases()[3])
    assert journal.latest is not None
    assert Replay.of(journal.latest).is_equal
    monkeypatch.setattr(module, name, value)
    assert not Replay.of(journal.latest).is_equal


def test_sums_over_replicas_do_not_depend_on_the_order_of_a_set() -> None:
    (*_, case) = (case for case in cases() if len(case.fleet.ready) > 5)
    pods = list(decide(case)[1].demand.replicas)
    assert len(pods) > 5
    assert pods == sorted(pods), "the order of a set differs between processes"


def test_the_last_five_changes_and_the_last_decision_are_kept() -> None:
    case = cases()[0]
    decision, _ = decide(case)
    journal = Journal()
    for number in range(1, 9):
        for _ in range(3):
            journal = journal.add(Entry(float(number), case, replace(decision, replicas=number)))
    assert [entry.decision.replicas for entry in journal.changes] == [4, 5, 6, 7, 8]
    assert journal.latest is not None
    assert journal.latest.decision.replicas == 8
    assert Journal().add(Entry(0.0, case, replace(decision, replicas=case.fleet.replicas))).changes == ()


def test_decisions_are_served_on_loopback_to_localhost_only() -> None:
    case = cases()[0]
    assert math.isinf(case.state.since), "JSON has no infinity"
    journal = Journal().add(Entry(1.0, case, decide(case)[0]))
    server = decision_server(0, {("space", "chat"): journal}.get)
    server.start()
    url = f"http://127.0.0.1:{server.port}"
    try:
        get = client().get
        found = get(f"{url}/decisions/space/chat")
        assert found.status_code == 200
        assert journal_from_json(found.json()["journal"]) == journal
        assert get(f"{url}/decisions/space/other").status_code == 404
        assert get(f"{url}/decisions/space/chat/x").status_code == 404
        assert get(f"{url}/").status_code == 404
        assert get(f"{url}/decisions/space/chat", headers={"Host": "evil.example"}).status_code == 403
        assert client().post(f"{url}/decisions/space/chat").status_code == 501
        with pytest.raises(httpx.ConnectError):  # no other interface
            get(f"http://127.0.0.2:{server.port}/decisions/space/chat")
    finally:
        server.stop()
