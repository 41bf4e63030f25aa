"""What happens to requests: sent, held, released, refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fastgen_gateway.routing import router
from fastgen_gateway.routing.held_requests import Held, HoldLimits
from fastgen_gateway.routing.model_table import Exposed
from fastgen_gateway.routing.refusal import Refusal
from fastgen_gateway.routing.request_body import RequestBody
from fastgen_gateway.routing.router import DEMAND_PAGE, Choice, Router
from gateway.routing.samples import sample

KEY = ("default", "m")


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    clock: Clock
    router: Router

    def send(self, tokens: int = 10) -> Choice:
        choice = self.router.arrive(body(tokens))
        assert isinstance(choice, Choice)
        return choice

    def hold(self, tokens: int = 10, num_bytes: int = 100) -> Held:
        held = self.router.arrive(body(tokens, num_bytes))
        assert isinstance(held, Held), held
        return held

    def demand(self) -> dict[str, object]:
        found: dict[str, object] = self.router.demand()["deployments"]["default/m"]
        return found


def body(tokens: int = 10, num_bytes: int = 100) -> RequestBody:
    return RequestBody("m", num_bytes, tokens, ())


@pytest.fixture
def bench() -> Bench:
    clock = Clock()
    router = Router(clock, HoldLimits(seconds=60, requests=100, bytes=10_000))
    router.set_deployments([Exposed(*KEY, "m", "2026-01-01T00:00:00Z")])
    return Bench(clock, router)


def test_held_requests_are_released_in_their_order(bench: Bench) -> None:
    waiting = [bench.hold() for _ in range(3)]
    assert list(bench.router.release()) == []
    bench.router.set_endpoints(KEY, ["a"])
    assert [held for held, _ in bench.router.release()] == waiting
    assert bench.demand()["held"] == 0


def test_a_replica_gets_held_requests_until_its_backlog_takes_half_a_second(bench: Bench) -> None:
    for _ in range(50):
        bench.hold(500)
    bench.router.set_endpoints(KEY, ["a"])
    bench.router.observe(KEY, "a", sample(bench.clock.now), bench.clock.now)
    # It computes 256 tokens in 36 ms: about 3,500 in half a second.
    first = len(list(bench.router.release()))
    assert 7 <= first <= 9
    assert list(bench.router.release()) == []
    bench.clock.now += 0.2
    assert 2 <= len(list(bench.router.release())) <= 4


def test_a_replica_gets_no_more_held_requests_than_its_kv_cache_has_room_for(bench: Bench) -> None:
    for _ in range(50):
        bench.hold(500)
    bench.router.set_endpoints(KEY, ["a"])
    bench.router.observe(KEY, "a", sample(bench.clock.now, kv_capacity_tokens=1600.0), bench.clock.now)
    assert len(list(bench.router.release())) == 3


def test_several_ready_replicas_share_held_requests(bench: Bench) -> None:
    for _ in range(10):
        bench.hold()
    bench.router.set_endpoints(KEY, ["a", "b"])
    chosen = [outcome.address for _, outcome in bench.router.release() if isinstance(outcome, Choice)]
    assert chosen.count("a") == chosen.count("b") == 5


def test_a_later_request_does_not_overtake_held_ones(bench: Bench) -> None:
    waiting = [bench.hold() for _ in range(20)]
    bench.router.set_endpoints(KEY, ["a"])
    released = [held for held, _ in bench.router.release()]
    assert released == waiting[:8]
    later = bench.hold()
    for _ in range(3):
        for choice in [outcome for _, outcome in bench.router.release()]:
            assert isinstance(choice, Choice)
    assert later not in released


def test_a_held_prompt_that_no_replica_can_compute_holds_up_no_other(bench: Bench) -> None:
    """An engine rejects it at once: it need not wait until a replica has nothing else to do."""
    held = [bench.hold(tokens=200_000), bench.hold(tokens=60_000), bench.hold()]
    bench.router.set_endpoints(KEY, ["a"])
    bench.router.observe(KEY, "a", sample(bench.clock.now, running=1.0, kv_tokens=50_000.0), bench.clock.now)
    assert [each for each, _ in bench.router.release()] == held[:1]


@pytest.mark.parametrize(("others", "address"), [(0, "b"), (200, "a")])
def test_while_many_requests_arrive_a_prompt_waits_longer_for_its_prefix(
    bench: Bench, others: int, address: str
) -> None:
    bench.router.set_endpoints(KEY, ["a"])
    prompt = RequestBody("m", 1, 2000, tuple(range(30)))
    for each in [prompt] + others * [body()]:
        choice = bench.router.arrive(each)
        assert isinstance(choice, Choice)
        bench.router.end(choice)
    bench.router.set_endpoints(KEY, ["a", "b"])
    for name, backlog in (("a", 2600.0), ("b", 0.0)):
        bench.router.observe(KEY, name, sample(bench.clock.now, backlog_tokens=backlog), bench.clock.now)
    again = bench.router.arrive(prompt)
    assert isinstance(again, Choice)
    assert again.address == address


def test_models_without_replicas_take_no_place_in_the_index_of_prefixes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a tenant could expose so many that no prompt of others is sent where its prefix is cached."""
    monkeypatch.setattr(router, "_MOST_PREFIXES", 8)
    others = [("other", f"n{number}") for number in range(7)]
    exposed = [Exposed(*key, key[1], "2026-01-01T00:00:00Z") for key in (KEY, *others)]
    prompt = RequestBody("m", 1, 300, tuple(range(8)))

    def num_known() -> int:
        """Return how many of the prompt's blocks a further request finds, after one whose prompt is sent."""
        bench.router.arrive(prompt)
        return bench.router._fleets[KEY].prefixes.matches(prompt.blocks)["a"]

    bench.router.set_deployments(exposed)
    bench.router.set_endpoints(KEY, ["a"])
    assert num_known() == 8
    bench.router.set_endpoints(others[0], ["b"])
    assert num_known() == 4
    bench.router.set_endpoints(others[1], ["c"])
    bench.router.set_endpoints(others[2], ["d"])
    assert num_known() == 2
    bench.router.set_endpoints(others[1], [])
    bench.router.set_deployments([each for each in exposed if each.key != others[2]])
    assert num_known() == 4


def test_a_request_held_too_long_is_refused(bench: Bench) -> None:
    first = bench.hold()
    bench.clock.now += 30
    bench.hold()
    bench.clock.now += 30
    ((held, refusal),) = bench.router.release()
    assert held is first
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (503, "no_ready_replica")
    assert bench.demand()["held"] == 1


def test_held_requests_are_bounded_by_number_and_bytes(bench: Bench) -> None:
    bench.hold(num_bytes=9_950)
    refused = bench.router.arrive(body(num_bytes=51))
    assert isinstance(refused, Refusal)
    assert refused.status == 429
    for _ in range(50):
        bench.hold(num_bytes=1)
    for _ in range(49):
        bench.hold(num_bytes=0)
    refused = bench.router.arrive(body(num_bytes=0))
    assert isinstance(refused, Refusal)
    assert "100 requests, its limit" in refused.message


def test_a_held_request_that_is_abandoned_makes_room(bench: Bench) -> None:
    held = bench.hold(num_bytes=10_000)
    bench.router.abandon(held)
    bench.router.abandon(held)
    bench.hold(num_bytes=10_000)
    assert bench.router.held.total.requests == 1


def test_held_requests_of_a_deployment_that_is_gone_are_refused(bench: Bench) -> None:
    bench.hold()
    bench.router.set_deployments([])
    ((_, refusal),) = bench.router.release()
    assert isinstance(refusal, Refusal)
    assert refusal.status == 404


OTHERS = [("default", "n"), ("default", "o")]


def expose_others(bench: Bench) -> None:
    keys = [KEY, *OTHERS]
    bench.router.set_deployments([Exposed(*key, key[1], "2026-01-01T00:00:00Z") for key in keys])


def hold_of(bench: Bench, model: str, num_bytes: int = 10) -> Held | Refusal:
    found = bench.router.arrive(RequestBody(model, num_bytes, 10, ()))
    assert not isinstance(found, Choice)
    return found


def test_requests_of_one_model_keep_none_of_another_from_being_held(bench: Bench) -> None:
    expose_others(bench)
    many = [hold_of(bench, "m") for _ in range(100)]
    assert isinstance(hold_of(bench, "m"), Refusal)
    few = [hold_of(bench, "n") for _ in range(60)]
    assert [isinstance(each, Held) for each in few] == [True] * 50 + [False] * 10, "then it would hold as many"
    assert isinstance(hold_of(bench, "o"), Held)
    displaced = list(bench.router.release())
    assert [held for held, _ in displaced] == many[:48:-1], "the newest ones"
    assert {outcome.code for _, outcome in displaced if isinstance(outcome, Refusal)} == {"held_requests_full"}
    assert list(bench.router.release()) == []
    assert bench.router.held.total.requests == 100


def test_large_bodies_of_one_model_keep_none_of_another_from_being_held(bench: Bench) -> None:
    expose_others(bench)
    small = [hold_of(bench, "n", 100) for _ in range(10)]
    large = [hold_of(bench, "m", 3000) for _ in range(3)]
    assert isinstance(hold_of(bench, "n", 4500), Refusal), "it would hold more than what is left of the other"
    held = hold_of(bench, "o", 2000)
    assert isinstance(held, Held)
    assert [each for each, _ in bench.router.release()] == large[:1:-1]
    assert bench.router.held.total.bytes == 10 * 100 + 2 * 3000 + 2000
    assert all(bench.router.held.remove(each) for each in (*small, *large[:2], held) if isinstance(each, Held))
    assert bench.router.held.total.bytes == bench.router.held.total.requests == 0


def test_idle_seconds_begin_when_the_last_request_ends(bench: Bench) -> None:
    assert bench.demand()["idleSeconds"] is None
    bench.router.set_endpoints(KEY, ["a"])
    choice = bench.send()
    bench.clock.now += 50
    assert bench.demand()["idleSeconds"] == 0
    bench.router.end(choice)
    bench.clock.now += 7
    assert bench.demand()["idleSeconds"] == 7


def test_a_request_of_a_replica_that_is_gone_still_runs(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["a"])
    choice = bench.send()
    bench.router.set_endpoints(KEY, [])
    bench.clock.now += 50
    assert bench.demand()["idleSeconds"] == 0
    bench.router.end(choice)
    assert bench.demand()["idleSeconds"] == 0
    bench.clock.now += 3
    assert bench.demand()["idleSeconds"] == 3


def test_a_retried_request_counts_for_the_replica_that_answers(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["a", "b"])
    choice = bench.send()
    assert {choice.address, choice.fallback} == {"a", "b"}
    other = choice.fallback
    assert other is not None
    bench.router.served_by(choice, other)
    bench.clock.now += 2
    # The next one goes to the replica that has nothing now.
    assert bench.send().address != other
    bench.router.end(choice)


def test_a_replica_that_did_not_answer_gets_no_request_for_a_while(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["a", "b"])
    pauses = []
    for _ in range(3):
        choice = next(each for each in iter(bench.send, None) if each.address == "a")
        bench.router.served_by(choice, "b")
        bench.router.end(choice)
        began = bench.clock.now
        while bench.send().address == "b" and bench.send().address == "b":
            bench.clock.now += 0.25
        pauses.append(bench.clock.now - began)
    assert pauses == [1, 2, 4]


def test_requests_that_fail_together_count_once_and_an_answer_ends_the_series(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["a", "b"])
    for _ in range(2):
        failing = [each for each in [bench.send() for _ in range(8)] if each.address == "a"]
        assert len(failing) > 2
        for choice in failing:
            bench.router.served_by(choice, "b")
        bench.clock.now += 1
        answered = next(each for each in iter(bench.send, None) if each.address == "a")
        bench.router.served_by(answered, "a")
        for _ in range(20):
            bench.router.end(bench.send())


def test_replicas_get_requests_if_none_answered(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["a"])
    choice = bench.send()
    bench.router.served_by(choice, "gone")
    assert bench.send().address == "a"


def test_a_pod_that_drains_holds_nothing_and_still_sends(bench: Bench) -> None:
    bench.hold()
    bench.router.is_draining = True
    ((_, refusal),) = bench.router.release()
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.retry_after) == (503, 1)
    refused = bench.router.arrive(body())
    assert isinstance(refused, Refusal)
    assert refused.code == "gateway_draining"
    bench.router.set_endpoints(KEY, ["a"])
    bench.send()


def test_the_requests_that_ended_do_not_count(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["a", "b"])
    first = [bench.send() for _ in range(6)]
    for choice in first:
        if choice.address == "a":
            bench.router.end(choice)
    assert [bench.send().address for _ in range(3)] == ["a", "a", "a"]


def test_the_demand_of_many_deployments_has_pages(bench: Bench) -> None:
    """Deployments that come and go between two pages hide no other."""
    names = {f"m{number}" for number in range(2 * DEMAND_PAGE + 1)}

    def exposed(names: set[str]) -> list[Exposed]:
        return [Exposed("default", name, name, "2026-01-01T00:00:00Z") for name in names]

    bench.router.set_deployments(exposed(names))
    first = bench.router.demand()
    bench.router.set_deployments(exposed(names - {first["next"].partition("/")[2]} | {"a", "z"}))
    second = bench.router.demand(first["next"])
    third = bench.router.demand(second["next"])
    assert [len(each["deployments"]) for each in (first, second, third)] == [DEMAND_PAGE, DEMAND_PAGE, 2]
    assert "next" not in third
    found = {**first["deployments"], **second["deployments"], **third["deployments"]}
    assert found.keys() == {f"default/{name}" for name in names} | {"default/z"}


def test_a_choice_for_a_deployment_that_is_gone_ends_quietly(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["a"])
    choice = bench.send()
    bench.router.set_deployments([])
    bench.router.served_by(choice, "b")
    bench.router.end(choice)
    assert bench.router.demand()["deployments"] == {}


def test_requests_from_before_a_deployment_was_not_exposed_for_a_while_do_not_count(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["a", "b"])
    before = [bench.send(), bench.send()]
    bench.router.set_deployments([])
    bench.router.set_deployments([Exposed(*KEY, "m", "2026-01-01T00:00:00Z")])
    bench.router.set_endpoints(KEY, ["a", "b"])
    for choice in before:
        bench.router.served_by(choice, "b")
        bench.router.end(choice)
    assert bench.demand()["running"] == 0
    assert bench.demand()["idleSeconds"] is None
    assert sorted(bench.send().address for _ in range(2)) == ["a", "b"]
    assert bench.demand()["running"] == 2


def test_the_prefixes_of_all_models_are_bounded_together(bench: Bench) -> None:
    names = [f"m{number}" for number in range(100)]
    bench.router.set_deployments([Exposed("default", name, name, "2026-01-01T00:00:00Z") for name in names])
    for number, name in enumerate(names):
        bench.router.set_endpoints(("default", name), ["a"])
        for start in range(0, 6000, 500):
            blocks = tuple(range(number * 10_000 + start, number * 10_000 + start + 500))
            bench.router.arrive(RequestBody(name, 100, 10, blocks))
    known = [len(fleet.prefixes) for fleet in bench.router._fleets.values()]
    assert known == [4000] * 100


def test_endpoints_and_metrics_of_unknown_deployments_are_ignored(bench: Bench) -> None:
    bench.router.set_endpoints(("default", "other"), ["a"])
    bench.router.observe(("default", "other"), "a", sample(), 0.0)
    bench.router.observe(KEY, "gone", sample(), 0.0)
    assert list(bench.router.endpoints()) == [(KEY, "m", ())]


def tries(bench: Bench, percent: int) -> None:
    """Let a new revision be tried on a share of the requests."""
    bench.router.set_deployments([Exposed(*KEY, "m", "2026-01-01T00:00:00Z", percent)])


def sent_to(bench: Bench, number: int) -> str:
    """Return the replicas of as many requests, one after another."""
    found = []
    for _ in range(number):
        choice = bench.send()
        found.append(choice.address)
        bench.router.end(choice)
    return "".join(found)


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, "ssss"), (10, "sssssssssc"), (40, "sscsc"), (50, "sc"), (75, "sccc"), (100, "cccc")],
)
def test_a_new_revision_gets_exactly_its_share(bench: Bench, percent: int, expected: str) -> None:
    bench.router.set_endpoints(KEY, ["s"], canaries=["c"])
    tries(bench, percent)
    found = sent_to(bench, 1000)
    assert found.count("c") == 10 * percent
    assert all(abs(found[:n].count("c") - n * percent / 100) < 1 for n in range(1, 1000)), "in each sequence"
    assert found.startswith(2 * expected)


def test_a_share_does_not_depend_on_load_or_prefixes(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["s", "t"], canaries=["c"])
    tries(bench, 20)
    choices = [bench.router.arrive(RequestBody("m", 100, 1000, (1, 2, 3))) for _ in range(100)]
    assert sum(isinstance(each, Choice) and each.address == "c" for each in choices) == 20
    assert {each.reason for each in choices if isinstance(each, Choice) and each.address == "c"} == {"canary"}


def test_a_new_revision_without_a_ready_replica_gets_nothing_and_is_owed_nothing(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["s"])
    tries(bench, 50)
    assert sent_to(bench, 100) == "s" * 100
    bench.router.set_endpoints(KEY, ["s"], canaries=["c"])
    assert sent_to(bench, 6) == "scscsc"


def test_an_ejected_new_revision_is_left_out_and_gets_no_burst_afterwards(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["s"], canaries=["c"])
    tries(bench, 50)
    bench.send()
    failing = bench.send()
    assert failing.address == "c"
    bench.router.served_by(failing, "s")
    assert sent_to(bench, 100) == "s" * 100
    bench.clock.now += 60
    assert sent_to(bench, 8) == "ccscscsc"


def test_the_others_share_waits_for_the_others(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, [], canaries=["c"])
    tries(bench, 50)
    held = bench.hold()
    assert list(bench.router.release()) == [], "a new revision gets no more than its share"
    bench.router.set_endpoints(KEY, ["s"], canaries=["c"])
    ((released, choice),) = bench.router.release()
    assert released is held
    assert isinstance(choice, Choice)
    assert choice.address == "s"


def test_a_retry_of_a_request_never_goes_to_a_new_revision(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["s", "t"], canaries=["c", "d"])
    tries(bench, 50)
    for _ in range(20):
        choice = bench.send()
        assert choice.fallback in {"s", "t"} - {choice.address}


def test_held_requests_go_to_the_others_while_a_new_revision_has_no_room(bench: Bench) -> None:
    for _ in range(20):
        bench.hold(500)
    tries(bench, 50)
    bench.router.set_endpoints(KEY, ["s", "t", "u"], canaries=["c"])
    released = [choice for _, choice in bench.router.release() if isinstance(choice, Choice)]
    assert len(released) == 20, "eight at a time for each replica without metrics"
    assert sum(choice.address == "c" for choice in released) == 8


def test_a_new_revision_that_was_rolled_back_gets_no_request_from_then_on(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["s"], canaries=["c"])
    tries(bench, 100)
    running = bench.send()
    assert running.address == "c"
    tries(bench, 0)
    assert sent_to(bench, 50) == "s" * 50
    bench.router.set_endpoints(KEY, ["s"])
    bench.router.end(running)


def test_a_request_to_a_pool_is_sent_at_once_or_refused(bench: Bench) -> None:
    refused = bench.router.choose(KEY, body())
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (503, "no_ready_replica")
    assert bench.demand() | {"held": 0, "running": 0} == bench.demand(), "nothing waits"
    bench.router.set_endpoints(KEY, ["10.0.0.1:8000"])
    for number in range(200):
        assert isinstance(bench.router.choose(KEY, body()), Choice)
        assert bench.demand()["running"] == number + 1


@pytest.mark.parametrize(
    ("subset", "wanted"),
    [
        ({"10.0.0.2:8000"}, {"10.0.0.2:8000"}),
        ({"10.0.0.2", "10.0.0.3:8000"}, {"10.0.0.2:8000", "10.0.0.3:8000"}),
        ({"[fd00::1]"}, {"[fd00::1]:8000"}),
        ({"10.0.0.2:9000"}, set()),
        (set[str](), set()),
        (None, {"10.0.0.2:8000", "10.0.0.3:8000", "[fd00::1]:8000"}),
    ],
)
def test_a_request_to_a_pool_goes_to_a_replica_of_the_subset(
    bench: Bench, subset: set[str] | None, wanted: set[str]
) -> None:
    bench.router.set_endpoints(KEY, ["10.0.0.2:8000", "10.0.0.3:8000", "[fd00::1]:8000"], canaries=["10.0.0.9:8000"])
    outcomes = [bench.router.choose(KEY, body(), subset) for _ in range(12)]
    assert {each.address for each in outcomes if isinstance(each, Choice)} == wanted
    assert isinstance(bench.router.choose(KEY, body(), {"10.0.0.9:8000"}), Refusal), "a canary is not in the pool"


def test_a_replica_that_did_not_answer_gets_requests_of_a_pool_only_if_no_other_may(bench: Bench) -> None:
    bench.router.set_endpoints(KEY, ["a:1", "b:1"])
    choice = bench.router.choose(KEY, body(), {"a:1"})
    assert isinstance(choice, Choice)
    bench.router.served_by(choice, "b:1")
    found = [bench.router.choose(KEY, body(), subset) for subset in ({"a:1", "b:1"}, None, {"a:1"})]
    assert [each.address for each in found if isinstance(each, Choice)] == ["b:1", "b:1", "a:1"]
