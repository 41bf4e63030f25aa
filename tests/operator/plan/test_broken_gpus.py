"""Which pods are replaced because their GPU failed, and how often."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastgen import exit_codes
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import POD, Object
from fastgen_operator.plan.broken_gpus import LONGEST_PAUSE, MEMORY, next_replacement
from fastgen_operator.plan.plan import make_plan
from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.status import build_status
from harness.objects import container, leaving, observed, pod, situation, stored

NOW = datetime(2026, 1, 1, 0, 5, tzinfo=UTC)
GPU = {"engine": {"device": "cuda"}, "resources": {"gpu": {"count": 1}}}


def broken(name: str = "x", code: int = exit_codes.DEVICE_FAILED, **status: Any) -> Object:
    ended = {"terminated": {"exitCode": code, "reason": "Error", "message": "the GPU failed: Xid 79"}}
    return pod(name=name, **container(restarts=1, state={"running": {}}, lastState=ended, **status))


def serving(name: str, created: datetime) -> Object:
    return born(pod(name=name, ready=True, **container(ready=True, started=True, state={"running": {}})), created)


def born(found: Object, at: datetime) -> Object:
    return {**found, "metadata": {**found["metadata"], "creationTimestamp": at.isoformat()}}


def seen(*pods: Object, last: Object | None = None, at: datetime = NOW, **spec: Any) -> Situation:
    owner = stored(**(GPU | spec))
    return situation(observed(*pods, owner={**owner, "status": {"lastReplacement": last} if last else {}}), at)


def status_of(found: Situation) -> Object:
    return build_status(found, None)


def reconciled(found: Situation) -> Situation:
    """Return the situation after the status was written."""
    resource = {**found.observed.resource, "status": status_of(found)}
    return replace(found, observed=replace(found.observed, resource=resource))


def last_of(found: Situation) -> Any:
    return status_of(found).get("lastReplacement")


def deleted(found: Situation) -> list[str]:
    deletes = make_plan(found, Platform("engine:test")).deletes
    return [delete.child["metadata"]["name"] for delete in deletes if delete.kind == POD]


def record(pod: str = "chat-new-gone", count: int = 1, ago: timedelta = timedelta()) -> Object:
    time = (NOW - ago).isoformat().replace("+00:00", "Z")
    return {"pod": pod, "reason": "DeviceFailed", "message": "pod x: Xid 79", "count": count, "time": time}


@pytest.mark.parametrize("code", [exit_codes.DEVICE_FAILED, exit_codes.HUNG])
def test_a_pod_whose_gpu_failed_is_deleted_after_the_status_names_it(code: int) -> None:
    found = seen(broken(code=code))
    assert deleted(found) == [], "an operator that ends here has written nothing"
    after = reconciled(found)
    assert deleted(after) == ["chat-new-x"]
    assert last_of(after) == last_of(found), "no second write"
    assert "the GPU failed: Xid 79" in last_of(found)["message"]


def test_a_gpu_that_the_pod_claims_is_one() -> None:
    claims = {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]}}
    assert deleted(reconciled(seen(broken(), resources={"gpu": {"count": 0}}, podTemplate=claims))) == ["chat-new-x"]


@pytest.mark.parametrize(
    ("found", "spec"),
    [
        (broken(code=exit_codes.FAILED), {}),
        (broken(code=exit_codes.BAD_CONFIGURATION), {}),
        (broken(code=exit_codes.HUNG), {"engine": {"device": "cpu"}, "resources": {}}),
        (broken(started=True), {}),
        (leaving(broken()), {}),
    ],
    ids=["a defect", "a rejected setting", "a hung CPU", "an engine that drains after a restart", "already deleted"],
)
def test_other_pods_stay(found: Object, spec: Any) -> None:
    assert last_of(seen(found, **spec)) is None
    assert deleted(reconciled(seen(found, **spec))) == []


def test_an_engine_that_recovers_before_the_deletion_keeps_its_pod() -> None:
    assert deleted(seen(serving("x", NOW), last=record("chat-new-x"))) == []


def test_one_pod_at_a_time_is_replaced() -> None:
    found = reconciled(seen(broken("a"), broken("b")))
    assert deleted(found) == ["chat-new-a"]
    for first in (broken("a"), leaving(broken("a"))):
        later = seen(first, broken("b"), last=last_of(found), at=NOW + timedelta(hours=1))
        assert last_of(later) == last_of(found)
        assert "chat-new-b" not in deleted(reconciled(later))


@pytest.mark.parametrize(("count", "seconds"), [(1, 10), (2, 20), (5, 160), (6, 300), (2000, 300)])
def test_the_pause_doubles_like_the_backoff_of_the_kubelet(count: int, seconds: int) -> None:
    pause = timedelta(seconds=seconds)
    early = seen(broken(), last=record(count=count, ago=pause - timedelta(seconds=1)))
    assert last_of(early)["pod"] == "chat-new-gone"
    assert next_replacement(early) == NOW + timedelta(seconds=1)
    due = seen(broken(), last=record(count=count, ago=pause))
    assert (last_of(due)["pod"], last_of(due)["count"]) == ("chat-new-x", count + 1)
    assert next_replacement(due) is None, "nothing to wait for: a past time would spin"


def test_a_replacement_is_forgotten_after_ten_minutes_of_peace() -> None:
    assert last_of(seen(broken(), last=record(count=9, ago=LONGEST_PAUSE + MEMORY)))["count"] == 1


def test_a_clock_that_was_set_back_does_not_hold_a_replacement() -> None:
    assert last_of(seen(broken(), last=record(count=9, ago=-timedelta(hours=1))))["count"] == 1


def progressing(found: Situation) -> tuple[str, str]:
    (condition,) = (each for each in status_of(found)["conditions"] if each["type"] == "Progressing")
    return condition["reason"], condition["message"]


def test_the_condition_names_the_failure_until_the_new_pod_is_ready() -> None:
    last, gone = record(), leaving(broken("gone"))
    later = NOW + timedelta(seconds=1)
    for pods in ([gone], [gone, born(pod(name="y"), later)], [born(pod(name="y"), later)]):
        reason, message = progressing(seen(*pods, last=last, at=later))
        assert reason == "DeviceFailed"
        assert message == "pod x: Xid 79; the pod was replaced, and the new one is not ready yet"
    for pods in ([serving("y", later)], [serving("y", later), born(pod(name="z"), NOW + timedelta(hours=1))]):
        assert progressing(seen(*pods, last=last, at=NOW + timedelta(hours=1)))[0] != "DeviceFailed"
