"""Which replica is chosen."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastgen_gateway.routing.choice import ranked
from fastgen_gateway.routing.replica import STALE_SECONDS, Replica, Sent
from fastgen_operator.autoscale.sample import StepCoefficients
from gateway.routing.samples import MODEL, sample


def replica(name: str, **fields: Any) -> Replica:
    """Return a replica with metrics."""
    made = Replica(name)
    made.observe(sample(**fields), 0.0)
    return made


def best(
    replicas: list[Replica], tokens: int = 100, now: float = 0.0, turn: int = 0, rate: float = 0.0, **matches: int
) -> str:
    return ranked(replicas, tokens, matches, now, turn, rate)[0][0].address


def test_a_backlog_of_prompts_counts_by_the_time_that_it_takes() -> None:
    assert best([replica("a", backlog_tokens=3000.0), replica("b", backlog_tokens=1000.0)]) == "b"
    slow = StepCoefficients(*(4 * each for each in MODEL))
    assert best([replica("a", backlog_tokens=3000.0), replica("b", backlog_tokens=1000.0, step_model=slow)]) == "a"


def test_running_requests_count_by_the_gaps_that_they_get() -> None:
    assert best([replica("a", running=20.0), replica("b", running=5.0)]) == "b"


def test_the_gaps_of_those_that_run_outweigh_a_slightly_later_first_token() -> None:
    assert best([replica("a", running=20.0), replica("b", running=5.0, backlog_tokens=40.0)]) == "b"


def test_a_straggler_gets_less_by_itself() -> None:
    slow = StepCoefficients(*(3 * each for each in MODEL))
    fleet = [replica("a"), replica("b"), replica("slow", step_model=slow)]
    chosen: Counter[str] = Counter()
    for turn in range(120):
        found = ranked(fleet, 200, {}, 0.0, turn, 0.0)[0][0]
        found.add(Sent(0.0, 200, 200))
        chosen[found.address] += 1
    assert 0 < chosen["slow"] < chosen["a"] / 2
    assert abs(chosen["a"] - chosen["b"]) <= 2


def test_a_prefix_in_the_cache_wins_until_the_replica_has_too_much_to_do() -> None:
    assert best([replica("a", running=3.0), replica("b")], 2000, a=30) == "a"
    assert best([replica("a", backlog_tokens=20_000.0), replica("b")], 2000, a=30) == "b"


def test_a_prompt_stays_with_its_prefix_if_many_requests_would_wait_for_it_elsewhere() -> None:
    fleet = [replica("a", backlog_tokens=3000.0), replica("b")]
    assert best(fleet, 2000, a=30) == "b"
    assert best(fleet, 2000, rate=10.0, a=30) == "a"


def test_a_popular_prefix_is_computed_elsewhere_before_its_replica_is_much_later() -> None:
    assert best([replica("a", backlog_tokens=9000.0), replica("b")], 2000, rate=1e6, a=30) == "b"


def test_many_prompts_with_one_prefix_are_spread() -> None:
    fleet = [replica("a"), replica("b"), replica("c")]
    known = {"a": 30}
    chosen: Counter[str] = Counter()
    for turn in range(300):
        found, cached = ranked(fleet, 2000, known, 0.0, turn, 0.0)[0]
        found.add(Sent(0.0, 2000, max(1, 2000 - cached)))
        known[found.address] = 30
        chosen[found.address] += 1
    assert max(chosen.values()) < 1.5 * min(chosen.values())


def test_what_was_sent_since_the_metrics_counts_at_once() -> None:
    a, b = replica("a"), replica("b")
    a.add(Sent(0.1, 1000, 1000))
    assert best([a, b], now=0.1) == "b"


def test_a_full_kv_cache_costs_time() -> None:
    full = replica("a", kv_tokens=99_000.0, running=2.0)
    assert best([full, replica("b", running=4.0)], 5000) == "b"


def test_a_queued_prompt_in_the_cache_is_no_backlog() -> None:
    def queued(cached: int, **others: float) -> Replica:
        made = Replica("a")
        made.add(Sent(0.0, 10_000, 10_000 - cached))
        made.observe(sample(time=0.2, backlog_tokens=10_000.0, waiting=1.0, **others), 0.1)
        return made

    other = replica("b", time=0.2, running=1.0, backlog_tokens=300.0)
    assert best([queued(9_950), other], 100, now=0.2) == "a"
    assert best([queued(0), other], 100, now=0.2) == "b"
    assert best([queued(9_950, running=1.0), other], 100, now=0.2) == "b", "the backlog may be another picker's"


def test_without_metrics_the_fewest_requests_win() -> None:
    a, b = Replica("a"), Replica("b")
    a.add(Sent(0.0, 10, 10))
    assert best([a, b]) == "b"
    b.add(Sent(0.0, 10_000, 10_000))
    b.add(Sent(0.0, 10, 10))
    assert best([a, b]) == "a"


def test_without_metrics_a_prefix_wins_unless_its_replica_has_more_than_its_share() -> None:
    a, b = Replica("a"), Replica("b")
    a.add(Sent(0.0, 10, 10))
    assert best([a, b], 2000, a=30) == "a"
    for _ in range(8):
        a.add(Sent(0.0, 10, 10))
    assert best([a, b], 2000, a=30) == "b"


def test_stale_metrics_are_not_used() -> None:
    a, b = replica("a", backlog_tokens=1e6), replica("b")
    b.add(Sent(0.0, 1, 1))
    assert best([a, b], now=1.0) == "b"
    assert best([a, b], now=STALE_SECONDS + 1) == "a"


def test_a_replica_without_a_step_model_is_judged_by_that_of_the_others() -> None:
    fresh = Replica("fresh")
    assert best([replica("a", running=10.0), fresh]) == "fresh"
    for _ in range(12):
        fresh.add(Sent(0.0, 100, 100))
    assert best([replica("a", running=2.0), fresh]) == "a"


def test_equal_replicas_take_turns() -> None:
    fleet = [replica("a"), replica("b"), replica("c")]
    assert Counter(best(fleet, turn=turn) for turn in range(9)) == {"a": 3, "b": 3, "c": 3}


def test_of_many_replicas_some_are_compared_and_those_that_know_the_prefix() -> None:
    fleet = [replica(f"r{number}", running=5.0) for number in range(100)]
    fleet[90] = replica("r90", running=6.0)
    assert best(fleet, 2000, r90=30) == "r90"
    assert len({best(fleet, turn=turn) for turn in range(100)}) == 99


def test_the_next_best_replica_is_given_for_a_retry() -> None:
    fleet = [replica("a", running=9.0), replica("b", running=1.0), replica("c", running=4.0)]
    assert [each.address for each, _ in ranked(fleet, 100, {}, 0.0, 0, 0.0)] == ["b", "c"]
    assert [each.address for each, _ in ranked(fleet[:1], 100, {}, 0.0, 0, 0.0)] == ["a"]


def test_the_backlog_drains_between_scrapes() -> None:
    a, b = replica("a", backlog_tokens=1400.0), replica("b", running=10.0)
    assert best([a, b], now=0.0) == "b"
    assert best([a, b], now=1.0) == "a"
