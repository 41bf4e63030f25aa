"""Rehearsals of fleets: recorded, due, shown in the status and in the terminal, and continued by a new leader."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from time import thread_time
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen_operator.autoscale import loop
from fastgen_operator.autoscale.decide import Case, decide
from fastgen_operator.autoscale.journal import Entry, Journal, journal_from_json, to_json
from fastgen_operator.autoscale.loop import REHEARSAL_SECONDS, Autoscaler
from fastgen_operator.autoscale.measure.capacity import MeasuredCapacity, ReplicaSpeeds
from fastgen_operator.autoscale.policy import policy_of
from fastgen_operator.autoscale.rehearsal.arrivals import SLOT_SECONDS, Arrivals
from fastgen_operator.autoscale.rehearsal.codes import encoded
from fastgen_operator.autoscale.rehearsal.days import Days
from fastgen_operator.autoscale.rehearsal.forecast import FloorPlan
from fastgen_operator.autoscale.rehearsal.learning import Learning, Rehearsal, learn
from fastgen_operator.autoscale.rehearsal.replay import FleetModel
from fastgen_operator.autoscale.rules.schedules import Floor
from fastgen_operator.autoscale.watchlist import Record, Subject, Watchlist
from fastgen_operator.kinds import Key
from fastgen_operator.metrics import Metrics
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.subject import subject_of
from fastgen_operator.plugin.cluster import PluginError
from fastgen_operator.plugin.commands import what_if
from fastgen_operator.plugin.commands.explain_scaling import learned_lines
from fastgen_operator.plugin.commands.what_if import rehearsed, replayed
from fastgen_operator.plugin.screen import Screen
from fastgen_operator.status.autoscaling import autoscaling_status
from harness.fluid import FluidFleet, policy
from harness.objects import situation, spec_of, stored

KEY = ("space", "chat")
RATE = 8000.0
BEGIN = 1.7e9 - 1.7e9 % SLOT_SECONDS
CAPACITY = ReplicaSpeeds(capacity=MeasuredCapacity(RATE, 512, "StepModel"))
BURSTS = ([RATE] * 32 + [4.1 * RATE] * 8) * 24


def recorded(rates: list[float]) -> Arrivals:
    arrivals = Arrivals()
    for slot, rate in enumerate([*rates, 0.0]):
        arrivals = arrivals.add(BEGIN + slot * SLOT_SECONDS, rate)
    return arrivals


def subject(**changes: Any) -> Subject:
    rules = replace(policy(min_replicas=1, max_replicas=16), learning="Apply")
    return replace(Subject(uid="u", policy=rules, model_name="chat", replicas=2), **changes)


def record_of(seen: Subject, rates: list[float]) -> Record:
    """Return the record of a fleet whose capacity is known."""
    record = Record.of(seen)
    record.arrivals = recorded(rates)
    record.state = replace(record.state, speeds=CAPACITY)
    return record


def rounds(count: int, seen: Subject, rates: list[float]) -> tuple[Autoscaler, Record, list[Key]]:
    """Rehearse a fleet some times, each when it is due."""
    watchlist, woken = Watchlist(5.0), list[Key]()
    watchlist.register(KEY, seen)
    record = watchlist.open_record(KEY, seen)
    assert record is not None
    record.arrivals, record.state = recorded(rates), replace(record.state, speeds=CAPACITY)
    time = BEGIN + len(rates) * SLOT_SECONDS
    scaler = Autoscaler(watchlist, None, Metrics(), woken.append, lambda: datetime.fromtimestamp(time, UTC))  # type: ignore[arg-type]

    async def run() -> None:
        nonlocal time
        for _ in range(count):
            assert await scaler.rehearse_once(KEY) > 0
            assert await scaler.rehearse_once(KEY) == 0, "it is not due again"
            record.rehearsed -= REHEARSAL_SECONDS
            time += REHEARSAL_SECONDS

    asyncio.run(run())
    return scaler, record, woken


def test_a_rehearsal_learns_step_by_step_and_requests_a_new_status() -> None:
    _, record, woken = rounds(4, subject(), BURSTS)
    assert record.learning.floor == 6
    assert record.shown_learning == record.learning
    assert woken == [KEY] * 4, "2, 3, 4 and 6 replicas"
    assert record.journal.learning == record.learning


def test_a_schedule_above_the_learned_bound_does_not_end_it() -> None:
    _, record, _ = rounds(6, subject(floor=Floor("day", 10, None)), BURSTS)
    assert record.learning.floor == 6


def test_a_bound_of_an_earlier_leader_does_not_change_at_once() -> None:
    watchlist, seen = Watchlist(5.0), subject(stored={"minReplicas": 2, "message": "", "arrivals": "?"})
    watchlist.register(KEY, seen)
    record = watchlist.open_record(KEY, seen)
    assert record is not None
    record.arrivals, record.state = recorded(BURSTS), replace(record.state, speeds=CAPACITY)
    scaler = Autoscaler(watchlist, None, Metrics(), print, lambda: datetime.now(UTC))  # type: ignore[arg-type]
    assert asyncio.run(scaler.rehearse_once(KEY)) == 0
    record.rehearsed -= REHEARSAL_SECONDS
    assert asyncio.run(scaler.rehearse_once(KEY)) > 0
    assert record.learning.floor == 3


def test_the_status_shows_the_same_bound_again_only_after_half_an_hour() -> None:
    _, record, woken = rounds(3, subject(), [1.5 * RATE] * 600)
    assert (record.learning.floor, woken, record.shown_learning) == (0, [], None)
    _, record, woken = rounds(4, subject(), [1.5 * RATE] * 600)
    assert woken == [KEY]
    assert record.shown_learning is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": replace(policy(), learning="Disabled")},
        {"policy": replace(policy(), min_replicas=0)},
        {"is_autoscaled": False},
    ],
)
def test_nothing_is_recorded_or_rehearsed_where_nothing_may_be_learned(changes: dict[str, Any]) -> None:
    seen = subject(**changes)
    assert not seen.learns
    assert record_of(seen, BURSTS).rehearsal(seen) is None


def test_nothing_is_rehearsed_before_the_capacity_is_known() -> None:
    record = record_of(subject(), BURSTS)
    assert record.rehearsal(subject()) is not None
    record.state = replace(record.state, speeds=ReplicaSpeeds())
    assert record.rehearsal(subject()) is None


@pytest.mark.parametrize("speed", [5e-324, 1e-300, 0.001, 1.0, 1.7e308])
def test_a_rehearsal_with_an_absurd_capacity_is_skipped_or_ends(speed: float) -> None:
    record = record_of(subject(), [0.0, 2e28] * 300)
    record.state = replace(record.state, speeds=ReplicaSpeeds(capacity=MeasuredCapacity(speed, 512, "StepModel")))
    rehearsal = record.rehearsal(subject())
    assert (rehearsal is None) == (speed < 0.001)
    assert rehearsal is None or learn(rehearsal).message


def test_scrapes_are_recorded_and_their_failures_are_not() -> None:
    rules = policy(min_replicas=1, max_replicas=10)
    fleet = FluidFleet.of(2, rules, lambda _: 1.0, silent=lambda time, _: 300 <= time < 600)
    seen = subject(policy=replace(rules, learning="Advise"))
    record = Record.of(seen)
    time = 0.0
    while fleet.time < 900:
        fleet.run(5)
        pods = tuple(replica.view(name, fleet.time) for name, replica in fleet.replicas.items())
        now = replace(seen, pods=pods, replicas=len(pods))
        answers = {name: None if fleet.silent(fleet.time, name) else fleet.samples.get(name) for name in fleet.replicas}
        time = BEGIN + fleet.time
        record.update(now, answers, fleet.time, time)
    rates = record.arrivals.rates()
    known = [rate for rate in rates if rate is not None]
    assert known[5:] == pytest.approx([sum(known[5:]) / len(known[5:])] * len(known[5:]), rel=0.1)
    gap = rates[int(300 / SLOT_SECONDS) : int(600 / SLOT_SECONDS) - 1]
    assert gap.count(None) >= len(gap) - 1
    assert rates[-1] is not None, "and recording goes on"


def test_a_new_leader_continues_from_the_status_and_survives_a_damaged_one() -> None:
    learned = Learning(floor=4, message="as before", arrivals=recorded(BURSTS).encode())
    record = Record.of(subject(stored=learned.to_status()))
    assert (record.learning.floor, record.arrivals.rates()) == (4, recorded(BURSTS).rates())
    damaged = Record.of(subject(stored={"minReplicas": 4, "message": "", "arrivals": "?"}))
    assert (damaged.learning.floor, damaged.arrivals) == (4, Arrivals())
    assert Record.of(subject(stored={})).learning == Learning()


def test_another_mode_of_autoscaling_keeps_what_was_learned() -> None:
    record = record_of(subject(), BURSTS)
    record.learning = Learning(floor=4)
    after = record.without_decisions((True, True))
    assert (after.learning.floor, after.arrivals) == (4, record.arrivals)


def test_the_spec_chooses_the_mode_and_the_wanted_share() -> None:
    chosen = {"maxReplicas": 4, "learning": "Apply", "targets": {"attainmentPercent": 95}}
    spec = spec_of(stored(autoscaling=chosen))
    assert (policy_of(spec, 1, 5.0).learning, policy_of(spec, 1, 5.0).attainment) == ("Apply", 0.95)
    default = policy_of(spec_of(stored(autoscaling={"maxReplicas": 4})), 1, 5.0)
    assert (default.learning, default.attainment) == ("Advise", 0.99)


def seen_with(status: dict[str, Any], **autoscaling: Any) -> Any:
    owner = stored(autoscaling={"maxReplicas": 5, **autoscaling})
    return situation(Observed({**owner, "status": {"autoscaling": status}}, {}))


def test_the_status_shows_what_was_learned_and_keeps_it_over_a_restart() -> None:
    learned = Learning(floor=4, message="at least 4 replicas: why", arrivals="1.abc")
    shown = autoscaling_status(replace(seen_with({}), learning=learned), "2026-01-01T00:00:00Z")
    assert shown is not None
    assert shown["learning"] == {"minReplicas": 4, "message": "at least 4 replicas: why", "arrivals": "1.abc"}
    again = autoscaling_status(seen_with(shown), "2026-01-01T00:00:00Z")
    assert again is not None
    assert again["learning"] == shown["learning"]
    for gone in ({"learning": "Disabled"}, {"minReplicas": 0}):
        seen = replace(seen_with(shown, **gone), has_gateway=True)
        without = autoscaling_status(seen, "2026-01-01T00:00:00Z")
        assert without is not None
        assert "learning" not in without
    assert subject_of(seen_with(shown), 5.0).stored == shown["learning"]


def journal(mode: str = "Advise", *, learned: bool = True) -> Journal:
    """Return a journal as the plugin receives it."""
    rules = replace(policy(min_replicas=1, max_replicas=16), learning=mode)  # type: ignore[arg-type]
    fleet = FluidFleet.of(2, rules, lambda _: 1.0)
    fleet.run(60)
    case = Case(policy=rules, fleet=fleet.observed(), now=fleet.time + 1, state=fleet.state)
    found = Journal().add(Entry(1.7e9, case, decide(case)[0]))
    if learned:
        model = FleetModel(policy=rules, tokens_per_second=RATE, start_seconds=60.0)
        rehearsal = Rehearsal(model=model, arrivals=recorded(BURSTS).encode(), before=5)
        found = replace(found, rehearsal=rehearsal, learning=learn(rehearsal))
    return journal_from_json(to_json(found))


def test_explain_scaling_says_what_was_learned_and_whether_it_applies() -> None:
    advice, applied = " ".join(learned_lines(journal())), " ".join(learned_lines(journal("Apply")))
    assert "at least 6 replicas: in the last 2.0 h" in " ".join(advice.split())
    assert advice.endswith("applies it)")
    assert applied.endswith("(applied)")
    assert "no rehearsal of the recorded arrivals yet" in " ".join(learned_lines(journal(learned=False)))
    assert "disabled by spec.autoscaling.learning" in " ".join(learned_lines(journal("Disabled", learned=False)))


def test_what_if_compares_the_present_settings_with_others() -> None:
    found = journal().rehearsal
    assert found is not None
    present, least, exact = replayed(found, 6, None)
    assert [each.title for each in (present, least, exact)] == [
        "present, 1 to 16", "at least 6 replicas", "exactly 6 replicas",
    ]  # fmt: skip
    assert present.outcome.attainment < least.outcome.attainment
    assert least.outcome.replica_seconds >= exact.outcome.replica_seconds == 6 * exact.outcome.seconds
    stricter, *_ = replayed(found, None, 200)
    assert stricter.outcome.attainment < present.outcome.attainment
    assert stricter.to_json()["firstTokenMilliseconds"] == 200
    many = replayed(found, 40, None)
    assert many[1].to_json()["maxReplicas"] == 40


@pytest.mark.parametrize(
    ("autoscaling", "words"),
    [
        ({"learning": "Disabled"}, "learning: Disabled"),
        ({"minReplicas": 0}, "minReplicas: 0"),
        ({}, "has not rehearsed the arrivals of chat yet"),
    ],
)
def test_what_if_says_why_there_is_nothing_to_replay(autoscaling: dict[str, Any], words: str) -> None:
    with pytest.raises(PluginError, match=words):
        rehearsed("chat", {"spec": {"autoscaling": autoscaling}}, journal(learned=False))


def test_what_if_prints_a_table_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_journal = journal()
    monkeypatch.setattr(what_if, "fetch", lambda *_: ("operator-1", "1.0", recorded_journal))
    cluster: Any = SimpleNamespace(namespace="space", resource=lambda _: {"spec": {"autoscaling": {}}})

    def printed(*arguments: str) -> str:
        parser = argparse.ArgumentParser()
        what_if.add_arguments(parser)
        stream = io.StringIO()
        assert what_if.run(parser.parse_args(["chat", *arguments]), cluster, Screen(stream, {})) == 0
        return stream.getvalue()

    text = printed("--replicas", "6")
    for words in (
        "space/chat: the arrivals of the last 4.0 h",
        "60 s to start",
        "at least 6 replicas",
        "REPLICA-HOURS",
    ):
        assert words in " ".join(text.split())
    variants = json.loads(printed("--replicas", "6", "--target-first-token", "500", "-o", "json"))["variants"]
    assert [each["minReplicas"] for each in variants] == [1, 6, 6]
    assert {each["firstTokenMilliseconds"] for each in variants} == {500}
    with pytest.raises(SystemExit):
        printed("--replicas", "0")


def test_all_rehearsals_together_use_at_most_their_share_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    watchlist, pauses = Watchlist(5.0), list[float]()
    for name in ("one", "other"):
        watchlist.register(("space", name), subject())
    scaler = Autoscaler(watchlist, None, Metrics(), print, lambda: datetime.now(UTC))  # type: ignore[arg-type]

    async def took_seconds(*_: object) -> float:
        return 3.0

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            raise asyncio.CancelledError

    monkeypatch.setattr(Autoscaler, "rehearse_once", took_seconds)
    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scaler._rehearse())
    assert pauses == [150.0, 150.0, 5.0] * 2, "2 %"


def test_a_round_rehearses_each_fleet_as_it_is_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    watchlist, records = Watchlist(math.inf), dict[str, Record]()
    for name in ("first", "smaller", "disabled", "deleted"):
        watchlist.register(("space", name), subject())
        record = watchlist.open_record(("space", name), subject())
        assert record is not None
        record.arrivals, record.state = recorded(BURSTS), replace(record.state, speeds=CAPACITY)
        records[name] = record
    scaler = Autoscaler(watchlist, None, Metrics(), lambda _: None, lambda: datetime.now(UTC))  # type: ignore[arg-type]

    async def pause(seconds: float) -> None:
        if math.isinf(seconds):
            # The end of the round.
            raise asyncio.CancelledError
        rules = subject().policy
        watchlist.register(("space", "smaller"), subject(policy=replace(rules, max_replicas=2)))
        watchlist.register(("space", "disabled"), subject(policy=replace(rules, learning="Disabled")))
        watchlist.forget(("space", "deleted"))

    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scaler._rehearse())
    rehearsals = {name: record.journal.rehearsal for name, record in records.items()}
    bounds = {name: each.model.policy.max_replicas for name, each in rehearsals.items() if each is not None}
    assert bounds == {"first": 16, "smaller": 2}


def test_a_rehearsal_that_fails_is_logged_and_counted_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Rehearsal) -> Learning:
        began = thread_time()
        while thread_time() < began + 0.01:
            pass
        raise RuntimeError("for a test")

    monkeypatch.setattr(loop, "learn", fail)
    watchlist, seen = Watchlist(5.0), subject()
    watchlist.register(KEY, seen)
    record = watchlist.open_record(KEY, seen)
    assert record is not None
    record.arrivals, record.state = recorded(BURSTS), replace(record.state, speeds=CAPACITY)
    scaler = Autoscaler(watchlist, None, Metrics(), print, lambda: datetime.now(UTC))  # type: ignore[arg-type]
    assert asyncio.run(scaler.rehearse_once(KEY)) >= 0.01
    assert "space/chat: rehearsing its arrivals" in caplog.text
    assert record.learning == Learning()


def known_days(record: Record) -> None:
    """Let the record know two days with a rise at nine, and this morning until half past eight."""
    day = [0.3 * RATE] * 108 + [5 * RATE] * 108 + [0.3 * RATE] * 72
    # 2026-01-05 was a Monday.
    now = round(datetime(2026, 1, 8, 8, 30, tzinfo=UTC).timestamp()) // 300
    rates = [*day, *day, *day, *day[:102]]
    record.days = Days(now, encoded(rates))
    record.arrivals = Arrivals(now * 20, encoded([0.3 * RATE] * 1440))
    record.state = replace(record.state, speeds=CAPACITY)


def test_the_days_are_kept_in_the_status_and_a_new_leader_continues_from_them() -> None:
    record = Record.of(subject())
    known_days(record)
    rehearsal = record.rehearsal(subject())
    assert rehearsal is not None
    assert [record.set_learning(rehearsal, learn(rehearsal), time) for time in (1.7e9, 1.7e9 + 1800)] == [False, True]
    assert record.shown_learning is not None
    shown = record.shown_learning.to_status()
    again = Record.of(subject(stored=shown))
    assert (again.days, again.arrivals) == (record.days, record.arrivals)
    assert again.learning.plan == FloorPlan(), "it makes its own at once"
    damaged = Record.of(subject(stored={**shown, "days": "?"}))
    assert (damaged.days, damaged.arrivals) == (Days(), record.arrivals)
    older = Record.of(subject(stored={key: value for key, value in shown.items() if key != "days"}))
    assert (older.days, older.arrivals) == (Days(), record.arrivals)


def test_another_mode_of_autoscaling_keeps_the_days() -> None:
    record = Record.of(subject())
    known_days(record)
    assert record.without_decisions((True, True)).days == record.days


def test_the_plan_of_a_rehearsal_applies_at_its_time() -> None:
    rules = replace(policy(min_replicas=1, max_replicas=10), learning="Apply")
    fleet = FluidFleet.of(1, rules, lambda _: 0.3)
    fleet.run(60)
    pods = tuple(replica.view(name, fleet.time) for name, replica in fleet.replicas.items())
    seen = subject(policy=rules, pods=pods, replicas=1)
    record = Record.of(seen)
    record.learning = Learning(plan=FloorPlan(20_000, (0, 4)))
    record.update(seen, dict(fleet.samples), fleet.time, 20_000 * 300.0)
    assert record.decision is not None
    assert (record.decision.replicas, record.learned(20_000 * 300.0)) == (1, 0)
    record.update(seen, dict(fleet.samples), fleet.time + 5, 20_001 * 300.0)
    assert (record.decision.replicas, record.learned(20_001 * 300.0)) == (4, 4)
    assert record.decision.change is not None
    assert record.decision.change.reason == "FloorLearned"
    latest = journal_from_json(to_json(record.journal)).latest
    assert latest is not None
    assert decide(latest.case)[0] == latest.decision, "explain-scaling repeats it"
    assert record.learned(20_002 * 300.0) == 0


def test_scrapes_are_recorded_by_time_of_day() -> None:
    rules = policy(min_replicas=1, max_replicas=10)
    fleet = FluidFleet.of(2, rules, lambda _: 1.0)
    seen = subject(policy=replace(rules, learning="Advise"))
    record = Record.of(seen)
    while fleet.time < 900:
        fleet.run(5)
        pods = tuple(replica.view(name, fleet.time) for name, replica in fleet.replicas.items())
        record.update(replace(seen, pods=pods, replicas=len(pods)), dict(fleet.samples), fleet.time, BEGIN + fleet.time)
    known = [rate for rate in record.arrivals.rates() if rate is not None]
    days = [rate for rate in record.days.history().rates if rate is not None]
    assert days[-1] == pytest.approx(known[-1], rel=0.1)
    model = FleetModel(policy=rules, tokens_per_second=RATE, start_seconds=60.0)
    rehearsal = Rehearsal(model=model, arrivals=record.arrivals.encode(), days=record.days.encode())
    assert rehearsal.history == record.days.history()


def test_explain_scaling_says_what_earlier_days_require() -> None:
    record = Record.of(subject())
    known_days(record)
    rehearsal = record.rehearsal(subject())
    assert rehearsal is not None
    rehearsal = replace(rehearsal, model=replace(rehearsal.model, start_seconds=300.0))
    learning = learn(rehearsal)
    assert (learning.floor, learning.plan.highest) == (0, 6)
    found = replace(journal(), rehearsal=rehearsal, learning=learning)
    words = " ".join(" ".join(learned_lines(journal_from_json(to_json(found)))).split())
    assert "so up to 6 replicas in the next 2 h (advice; spec.autoscaling.learning: Apply applies it)" in words
