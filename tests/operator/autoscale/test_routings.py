"""The simulated routings keep to their rules, and the simulated prefix cache to the engine's."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from benchmarks.autoscaling.approximate import ApproximateReplica
from benchmarks.autoscaling.conversations import AGENTS, agent_sessions, conversation_traces
from benchmarks.autoscaling.device import A100_8B
from benchmarks.autoscaling.exact import ExactReplica
from benchmarks.autoscaling.fleet import Cluster, MakeRouting, Pod
from benchmarks.autoscaling.replica import Arrival, Engine, MakeReplica, Replica, RequestLog, Targets
from benchmarks.autoscaling.routing.comparison import ENGINE, ROUTINGS
from benchmarks.autoscaling.routing.gateway import Gateway
from benchmarks.autoscaling.routing.prefix_hash import PrefixHash
from benchmarks.autoscaling.routing.round_robin import RoundRobin
from benchmarks.autoscaling.routing.tokens_in_flight import TokensInFlight
from benchmarks.autoscaling.simulation import Scenario, View, simulate
from benchmarks.autoscaling.traces import Lengths, Trace

PREFIX = tuple(range(1, 33))  # 2048 tokens
SMALL = replace(ENGINE, device=replace(A100_8B, kv_tokens=64 * 100))


def pods(number: int, engine: Engine = ENGINE) -> list[Pod]:
    log = RequestLog()
    return [Pod(str(name), 0.0, replica=ApproximateReplica(engine, log, 0.0)) for name in range(number)]


def replica_of(pod: Pod) -> Replica:
    assert pod.replica is not None
    return pod.replica


def send(pod: Pod, arrival: Arrival) -> Pod:
    replica_of(pod).run_until(arrival.time)
    replica_of(pod).add(arrival)
    return pod


def with_prefix(time: float = 0.0, generate: int = 400, own: int = 50, blocks: tuple[int, ...] = PREFIX) -> Arrival:
    return Arrival(time, 64 * len(blocks) + own, generate, blocks)


def test_round_robin_takes_each_pod_in_turn() -> None:
    fleet, routing = pods(3), RoundRobin(random.Random(1))
    assert [routing.choose(fleet, Arrival(0.0, 10, 10)).name for _ in range(5)] == ["0", "1", "2", "0", "1"]


def test_the_prefix_hash_keeps_an_opening_on_its_pod_and_spreads_openings() -> None:
    fleet, routing = pods(3), PrefixHash(random.Random(1))
    chosen = {opening: routing.choose(fleet, Arrival(0.0, 10, 10, opening=opening)) for opening in range(300)}
    assert {routing.choose(fleet, Arrival(0.0, 99, 10, opening=7)) for _ in range(3)} == {chosen[7]}
    spread = Counter(pod.name for pod in chosen.values())
    assert min(spread[pod.name] for pod in fleet) > 50
    left = fleet[1:]
    for opening, pod in chosen.items():
        if pod is not fleet[0]:
            assert routing.choose(left, Arrival(0.0, 10, 10, opening=opening)) is pod, (
                "only openings of the lost pod move"
            )


def test_the_prefix_hash_leaves_a_pod_with_more_than_its_share_of_requests() -> None:
    fleet, routing = pods(4), PrefixHash(random.Random(1))
    first = Arrival(0.0, 10, 1000, opening=5)
    chosen = Counter(send(routing.choose(fleet, replace(first)), replace(first)).name for _ in range(40))
    assert max(chosen.values()) <= 1.25 * 40 / 4 + 1
    assert len(chosen) == 4


def tokens_in_flight(penalty: float) -> TokensInFlight:
    return TokensInFlight(random.Random(1), 1000.0, penalty)


def test_tokens_in_flight_count_and_not_requests() -> None:
    fleet, routing = pods(2), tokens_in_flight(1.0)
    large = send(routing.choose(fleet, Arrival(0.0, 5000, 100)), Arrival(0.0, 5000, 100))
    for _ in range(4):
        arrival = Arrival(0.0, 100, 100)
        assert send(routing.choose(fleet, arrival), arrival) is not large


def test_tokens_in_flight_end_with_the_answer() -> None:
    fleet, routing = pods(2), tokens_in_flight(1.0)
    first = Arrival(0.0, 5000, 2)
    large = send(routing.choose(fleet, first), first)
    other = Arrival(0.0, 100, 1000)
    assert send(routing.choose(fleet, other), other) is not large
    assert routing.choose(fleet, Arrival(5.0, 100, 2)) is large


def test_tokens_in_flight_stay_with_a_known_prefix_until_it_delays_the_first_token_too_long() -> None:
    for penalty, stays in ((10.0, True), (1.0, False)):
        fleet, routing = pods(2), tokens_in_flight(penalty)
        first = with_prefix()
        known = send(routing.choose(fleet, first), first)
        again = with_prefix()
        assert (routing.choose(fleet, again) is known) == stays, "2,098 tokens take two seconds"


def scrape(routing: Gateway, fleet: list[Pod], now: float) -> None:
    for pod in fleet:
        replica_of(pod).run_until(now)
    routing.observe([replica_of(pod).metrics(pod.name, now) for pod in fleet], now)


def served(fleet: list[Pod], routing: Gateway, until: float) -> None:
    """Have each pod fit its step model, and the gateway read it."""
    rng = random.Random(2)
    for pod in fleet:
        for number in range(40):
            send(pod, Arrival(number * until / 80, rng.randint(50, 3000), 30))
    scrape(routing, fleet, until)


def test_the_gateway_keeps_a_prefix_on_its_replica_and_says_so() -> None:
    fleet, routing = pods(3), Gateway(random.Random(1))
    routing.choose(fleet, Arrival(0.0, 10, 10))
    served(fleet, routing, 60.0)
    long = tuple(range(1, 200))
    first = with_prefix(60.0, blocks=long)
    known = send(routing.choose(fleet, first), first)
    for second in (62.0, 64.0, 66.0):
        scrape(routing, fleet, second)
        again = with_prefix(second, blocks=long)
        assert send(routing.choose(fleet, again), again) is known
    assert routing.reasons["prefix"] == 3


def test_the_gateway_sends_less_to_a_slow_replica_by_its_metrics() -> None:
    fleet, routing = pods(2), Gateway(random.Random(1))
    slow = replace(ENGINE, device=A100_8B.slowed(3.0))
    fleet.append(Pod("slow", 0.0, replica=ApproximateReplica(slow, RequestLog(), 0.0)))
    routing.choose(fleet, Arrival(0.0, 10, 10))
    served(fleet, routing, 60.0)
    chosen: Counter[str] = Counter()
    for number in range(90):
        now = 60.0 + number / 30
        arrival = Arrival(now, 1000, 100)
        chosen[send(routing.choose(fleet, arrival), arrival).name] += 1
        scrape(routing, fleet, now)
    assert 0 < chosen["slow"] < min(chosen["0"], chosen["1"]) / 2


def test_the_gateway_forgets_requests_that_ended() -> None:
    fleet, routing = pods(2), Gateway(random.Random(1))
    for _ in range(10):
        arrival = Arrival(0.0, 100, 5)
        send(routing.choose(fleet, arrival), arrival)
    assert sum(running for _, _, running in routing.num_ready()) == 10
    routing.choose(fleet, Arrival(60.0, 100, 5))
    assert sum(running for _, _, running in routing.num_ready()) == 1


class Restless:
    period = 7.0

    def __init__(self) -> None:
        self._rng = random.Random(4)

    def observe(self, view: View) -> int:
        assert view.alive >= 0
        return self._rng.randint(1, 4)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_every_request_ends_once_with_each_routing_while_the_fleet_changes(routing: MakeRouting) -> None:
    load = replace(AGENTS, system=Lengths(500, 600, 900), turns=4.0)
    trace = Trace(
        "short", "for a test", 90.0, conversation_traces(60.0)[1].mix, agent_sessions(load, 90.0, lambda _: 0.5, 0.5)
    )
    where = Cluster(start=lambda rng: rng.uniform(5.0, 10.0))
    result = simulate(
        Scenario(trace=trace, engine=ENGINE, cluster=where, begin=2, most=4, routing=routing, seed=3), Restless()
    )
    arrivals = sorted(arrival.time for arrival in trace.arrivals(3))
    assert len(arrivals) > 50
    assert sorted([row[0] for row in result.log.served] + result.log.lost) == arrivals


def play(make: MakeReplica, engine: Engine, arrivals: list[Arrival]) -> tuple[RequestLog, Replica]:
    log = RequestLog()
    replica = make(engine, log, 0.0)
    for arrival in arrivals:
        replica.run_until(arrival.time)
        replica.add(arrival)
    replica.drain(1e6)
    return log, replica


def hits(engine: Engine, arrivals: list[Arrival]) -> list[int]:
    return [hit for _, _, hit in play(ApproximateReplica, engine, arrivals)[0].prompts]


def test_a_prompt_finds_its_prefix_in_the_cache_once_that_is_computed() -> None:
    first, second = with_prefix(generate=2), with_prefix(10.0, generate=2)
    assert hits(ENGINE, [first, second]) == [0, 2048]
    assert hits(replace(ENGINE, prefix_cache=False), [first, second]) == [0, 0]
    at_once = replace(second, time=0.0)
    assert hits(ENGINE, [first, at_once]) == [0, 0], "the first one is not computed yet"
    whole = Arrival(20.0, 2048, 2, PREFIX)
    assert hits(ENGINE, [first, whole]) == [0, 2048 - 64], "at least a token is computed"


def test_the_next_turn_finds_the_answer_in_the_cache() -> None:
    first = Arrival(0.0, 128, 129, (1, 2, 3, 4))
    assert hits(ENGINE, [first, Arrival(60.0, 300, 2, (1, 2, 3, 4))]) == [0, 256]


def test_the_least_recently_used_blocks_are_evicted_beyond_the_capacity() -> None:
    """The cache has 100 blocks, and each prompt 40."""
    one, two, three = (tuple(range(1 + 1000 * name, 41 + 1000 * name)) for name in range(3))
    order = [one, two, one, three, one, two]
    arrivals = [Arrival(10.0 * number, 64 * 40 + 1, 2, blocks) for number, blocks in enumerate(order)]
    found = [hit // 64 for hit in hits(SMALL, arrivals)]
    assert found[:5] == [0, 0, 40, 0, 40], "two was used least recently when three came"
    assert 0 < found[5] < 40, "blocks at the end of a prompt are evicted first"


def test_blocks_of_running_requests_are_not_evicted() -> None:
    running = Arrival(0.0, 64 * 40 + 1, 1500, tuple(range(1, 41)))
    others = [
        Arrival(1.0 + number, 64 * 45, 2, tuple(range(base, base + 45))) for number, base in enumerate((100, 200, 300))
    ]
    again = Arrival(5.0, 64 * 40 + 1, 2, tuple(range(1, 41)))
    log, _ = play(ApproximateReplica, SMALL, [running, *others, again])
    assert {time: hit // 64 for time, _, hit in log.prompts}[5.0] == 40
    assert max(end for arrival, _, end, _ in log.served if arrival > 0) < max(end for _, _, end, _ in log.served)


def test_blocks_that_running_requests_share_take_their_room_once() -> None:
    """Four prompts of 40 blocks have room in a cache of 100, because they are nearly the same."""
    prefix = tuple(range(1, 41))
    sharing = [Arrival(5.0 + number / 10, 64 * 40 + 1, 500, prefix) for number in range(4)]
    log, _ = play(ApproximateReplica, SMALL, [Arrival(0.0, 64 * 40 + 1, 2, prefix), *sharing])
    waits = [first - arrival for arrival, first, _, _ in log.served if arrival > 0]
    assert len(waits) == 4
    assert max(waits) < 0.2


def test_a_prefix_cache_changes_nothing_without_shared_prefixes() -> None:
    rng, number = random.Random(5), iter(range(1, 1_000_000))
    arrivals = []
    for place in range(400):
        prompt = rng.randint(10, 3000)
        blocks = tuple(next(number) for _ in range(prompt // 64))
        arrivals.append(Arrival(place / 4, prompt, rng.randint(1, 200), blocks))
    for device in (A100_8B, replace(A100_8B, kv_tokens=30_000)):
        engine = Engine(device, Targets(1.0, 0.05))
        plain, cached = (
            play(ApproximateReplica, replace(engine, prefix_cache=cache), arrivals)[0] for cache in (False, True)
        )
        assert plain.served == cached.served


@pytest.mark.slow
@pytest.mark.parametrize(("kv_tokens", "tolerance"), [(400_000, 0.001), (40_000, 0.02)])
def test_the_prefix_cache_has_the_hits_of_the_real_one(kv_tokens: int, tolerance: float) -> None:
    load = replace(AGENTS, turns=6.0, system=Lengths(1500, 2000, 4000), added=Lengths(300, 500, 2000))
    made = agent_sessions(load, 60.0, lambda _: 0.4, 0.4)(1)
    # The real one has tokens, and those of simulated answers are all alike.
    arrivals = [replace(arrival, blocks=arrival.blocks[: arrival.prompt // 64]) for arrival in made]
    engine = replace(ENGINE, device=replace(A100_8B, kv_tokens=kv_tokens))
    real, approximate = (
        play(make, engine, arrivals)[1].metrics("pod", 1e6) for make in (ExactReplica, ApproximateReplica)
    )
    prompts = sum(arrival.prompt for arrival in arrivals)
    assert real.cached_prompt_tokens > 0.6 * prompts
    assert approximate.cached_prompt_tokens / prompts == pytest.approx(
        real.cached_prompt_tokens / prompts, abs=tolerance
    )


def test_conversation_traces_share_prefixes_and_are_the_same_for_a_seed() -> None:
    shared, agents, unshared = conversation_traces(120.0)
    for trace in (shared, agents, unshared):
        arrivals = trace.arrivals(1)
        times = [arrival.time for arrival in arrivals]
        assert times == sorted(times)
        again = list(trace.make(1))
        assert [(each.time, each.prompt, each.generate, each.blocks) for each in again] == [
            (each.time, each.prompt, each.generate, each.blocks) for each in arrivals
        ]
        before: dict[int, int] = {}
        for arrival in arrivals:
            assert len(arrival.blocks) <= (arrival.prompt + arrival.generate) // 64
            for parent, block in zip((0, *arrival.blocks), arrival.blocks, strict=False):
                assert before.setdefault(block, parent) == parent, "a block stands for all tokens up to its end"
    reused = sorted(known_share(list(agents.arrivals(1))))
    assert reused[len(reused) // 2] > 0.9
    arrivals = list(agents.arrivals(1))
    assert sum(each.prompt for each in arrivals) > 50 * sum(each.generate for each in arrivals)
    assert not any(known_share(list(unshared.arrivals(1))))


def known_share(arrivals: list[Arrival]) -> list[float]:
    """Return the share of each prompt that earlier prompts and answers had."""
    known: set[int] = set()
    shares = []
    for arrival in arrivals:
        blocks = arrival.blocks[: arrival.prompt // 64]
        shares.append(64 * sum(block in known for block in blocks) / arrival.prompt)
        known.update(arrival.blocks)
    return shares
