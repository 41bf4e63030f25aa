"""Metrics of each resource, and their removal with the resource."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fastgen_operator.autoscale.decision import Decision, Hold, Sizing
from fastgen_operator.kinds import Key
from fastgen_operator.metrics import Metrics

KEY, OTHER = ("space", "chat"), ("space", "other")


def series(metrics: Metrics, name: str, key: Key = KEY) -> list[tuple[dict[str, str], float]]:
    """Return the samples of a metric for the resource, by the labels other than namespace and name."""
    text = generate_latest(metrics.registry).decode()
    owner = dict(zip(("namespace", "name"), key, strict=True))
    return [
        ({label: text for label, text in sample.labels.items() if label not in owner}, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"fastgen_operator_{name}" and owner.items() <= sample.labels.items()
    ]


def test_a_condition_is_exported_only_with_its_present_status_and_reason() -> None:
    metrics = Metrics()
    metrics.set_conditions(KEY, [("Ready", "False", "ReplicasNotReady")])
    metrics.set_conditions(KEY, [("Ready", "True", "AllReplicasReady")])
    assert series(metrics, "condition") == [({"type": "Ready", "status": "True", "reason": "AllReplicasReady"}, 1)]


def test_decisions_are_counted_by_reason_and_the_last_reason_stands_alone() -> None:
    metrics = Metrics()
    for reason in ("Backlog", "Backlog", "Hold"):
        metrics.count_decision(KEY, reason)
    counted = {labels["reason"]: count for labels, count in series(metrics, "scaling_decisions_total")}
    assert counted == {"Backlog": 2, "Hold": 1}
    assert series(metrics, "scaling_reason") == [({"reason": "Hold"}, 1)]


def test_the_age_of_a_scrape_grows_until_the_next_one() -> None:
    now = 100.0
    metrics = Metrics(clock=lambda: now)
    assert series(metrics, "scrape_age_seconds") == []
    metrics.mark_scraped(KEY)
    now += 7
    assert series(metrics, "scrape_age_seconds") == [({}, 7)]
    metrics.mark_scraped(KEY)
    assert series(metrics, "scrape_age_seconds") == [({}, 0)]


def test_stragglers_are_exported_while_they_are_slow() -> None:
    metrics = Metrics()
    metrics.set_stragglers(KEY, {"chat-a": 0.3, "chat-b": 0.4})
    metrics.set_stragglers(KEY, {"chat-a": 0.35})
    assert series(metrics, "straggler_speed_ratio") == [({"pod": "chat-a"}, 0.35)]


def test_the_recommendation_is_exported_while_there_is_one() -> None:
    metrics = Metrics()
    metrics.set_recommended(KEY, 3)
    assert series(metrics, "recommended_replicas") == [({}, 3)]
    metrics.set_recommended(KEY, None)
    assert series(metrics, "recommended_replicas") == []


def test_an_unknown_load_is_absent_and_an_idle_fleet_has_none() -> None:
    metrics = Metrics()
    idle, unreachable = [({}, 0)], Hold("GatewayUnreachable", "timed out")
    for decision, exported in (
        (Decision(1), []),
        (Decision(1, sizing=Sizing(0.0, 1000.0, 0.7, 0.0)), idle),
        (Decision(0, hold=unreachable), []),
        (Decision(0), idle),
    ):
        metrics.set_load(KEY, decision.load)
        assert series(metrics, "scaling_load_replicas") == exported
    metrics.set_load(KEY, None)
    assert series(metrics, "scaling_load_replicas") == []


def test_a_resource_without_engines_has_no_scrape_age() -> None:
    metrics = Metrics()
    metrics.mark_scraped(KEY)
    metrics.clear_scrape(KEY)
    assert series(metrics, "scrape_age_seconds") == []


NAMES = (
    "desired_replicas",
    "ready_replicas",
    "condition",
    "scaling_decisions_total",
    "scaling_reason",
    "scrape_age_seconds",
)


def test_a_deleted_resource_is_removed_from_the_metrics_and_others_stay() -> None:
    metrics = Metrics()
    for key in (KEY, OTHER):
        metrics.set_replicas(key, 2, 1)
        metrics.set_conditions(key, [("Ready", "False", "ReplicasNotReady")])
        metrics.count_decision(key, "Backlog")
        metrics.mark_scraped(key)
    metrics.forget(KEY)
    metrics.forget(("space", "never seen"))
    assert [name for name in NAMES if series(metrics, name)] == []
    assert [name for name in NAMES if not series(metrics, name, OTHER)] == []
