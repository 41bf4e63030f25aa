"""What a situation derives, and when."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.kinds import DEPLOYMENT
from fastgen_operator.plan.observed import Observed
from harness.objects import observed, pod, situation, stored

OFFICE = {"name": "office", "start": "0 9 * * *", "end": "0 18 * * *", "timeZone": "UTC", "minReplicas": 4}


def test_what_is_derived_follows_what_was_read() -> None:
    seen = situation(observed(pod(ready=True), owner=stored(autoscaling={"maxReplicas": 5, "schedules": [OFFICE]})))
    assert (seen.desired_replicas, len(seen.supply), len(seen.observed.current_pods)) == (1, 1, 1)
    assert replace(seen, decision=Decision(3)).desired_replicas == 3
    assert replace(seen, now=datetime(2026, 1, 1, 12, tzinfo=UTC)).desired_replicas == 4
    assert replace(seen, observed=replace(seen.observed, pods=())).supply == ()
    assert seen.observed.deployment is not None
    live = seen.observed.deployment.obj
    # A write of the operator raises the generation: nothing is known of the newest template's pods until then.
    written = {**live, "metadata": {**live["metadata"], "generation": 8}, "spec": {**live["spec"], "replicas": 2}}
    after = replace(seen, observed=seen.observed.with_child(DEPLOYMENT, written))
    assert (after.desired_replicas, after.observed.current_pods) == (2, ())
    assert seen.desired_replicas == 1, "the situation before the write stays as it was"


def test_observed_has_only_what_the_api_server_said() -> None:
    names = ["resource", "children", "replica_sets", "pods", "fetch_pods", "canary_pods", "name_holder"]
    assert [each.name for each in fields(Observed)] == names
