"""The autoscaling simulator is accurate: requests, engine, and compared policies."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.autoscaling import comparison
from benchmarks.autoscaling.approximate import ApproximateReplica
from benchmarks.autoscaling.comparison import Grid, Row, stored, verdicts
from benchmarks.autoscaling.configurations import CONSTANT, OURS, Limits, PolicyConfiguration
from benchmarks.autoscaling.device import A100_8B, CPU_135M, Device
from benchmarks.autoscaling.exact import ExactReplica
from benchmarks.autoscaling.fleet import Cluster, Pod, balanced, least_loaded, least_loaded_of_all, random_pod
from benchmarks.autoscaling.policies.clairvoyant import clairvoyant
from benchmarks.autoscaling.policies.fastgen import Operator
from benchmarks.autoscaling.policies.fixed import Fixed
from benchmarks.autoscaling.policies.hpa import Behavior, WaitingRequests
from benchmarks.autoscaling.policies.knative import Concurrency
from benchmarks.autoscaling.pool import Store, run_all
from benchmarks.autoscaling.replica import Arrival, Engine, MakeReplica, ReplicaMetrics, RequestLog, Targets
from benchmarks.autoscaling.results import Figures, figures, interval
from benchmarks.autoscaling.simulation import Policy, Run, Scenario, View, simulate
from benchmarks.autoscaling.traces import AZURE_CODE, AZURE_CONVERSATION, BURST_GPT, Lengths, Mix, Trace, traces
from hypothesis import given, settings
from hypothesis import strategies as st

GPU = Engine(A100_8B, Targets(1.0, 0.05))
ASYNCHRONOUS = replace(GPU, device=replace(A100_8B, steps_in_flight=2))
# With the cost of attention over a context, which `A100_8B` omits; its comment derives the number.
CONTEXTS = replace(GPU, device=replace(A100_8B, context_pair=2.8e-9))
CPU = Engine(CPU_135M, Targets(10.0, 0.4))


def poisson(mix: Mix, rate: float, seconds: float, seed: int = 3) -> list[Arrival]:
    rng = random.Random(seed)
    now, found = rng.expovariate(rate), []
    while now < seconds:
        found.append(Arrival(now, mix.prompt.draw(rng), mix.generate.draw(rng)))
        now += rng.expovariate(rate)
    return found


def short(arrivals: list[Arrival], seconds: float) -> Trace:
    return Trace("short", "for a test", seconds, AZURE_CONVERSATION, lambda _: iter(arrivals))


class Restless:
    """A policy with a random number of replicas every few seconds."""

    period = 7.0

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def observe(self, view: View) -> int:
        assert view.alive >= 0
        return self._rng.randint(1, 6)


def run(
    policy: Policy,
    *,
    seed: int = 1,
    rate: float = 6.0,
    gpus: int = 5,
    seconds: float = 180.0,
    make: MakeReplica = ApproximateReplica,
    engine: Engine = GPU,
    **cluster: Any,
) -> Run:
    trace = short(poisson(AZURE_CONVERSATION, rate, seconds, seed), seconds)
    where = Cluster(gpus=gpus, start=lambda rng: rng.uniform(10.0, 20.0), **cluster)
    return simulate(Scenario(trace=trace, engine=engine, cluster=where, begin=2, most=8, seed=seed), policy, make)


def operator() -> Operator:
    return Operator({"maxReplicas": 8}, {"device": "cuda", "maxSequences": 256})


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 8))
def test_every_request_ends_exactly_once_while_the_fleet_changes(seed: int, gpus: int) -> None:
    result = run(Restless(seed), seed=seed, gpus=gpus)
    arrivals = sorted(arrival.time for arrival in result.scenario.trace.arrivals(seed))
    assert sorted([row[0] for row in result.log.served] + result.log.lost) == arrivals
    assert all(arrival < first <= end for arrival, first, end, _ in result.log.served)


@pytest.mark.slow
@pytest.mark.parametrize("make", [ApproximateReplica, ExactReplica])
def test_the_same_seed_gives_the_same_run(make: MakeReplica) -> None:
    one, other = (run(Restless(4), rate=1.0, seconds=45.0, make=make) for _ in range(2))
    assert one.log == other.log
    assert one.samples == other.samples
    assert run(Restless(4), rate=1.0, seed=2).log != one.log


def test_every_request_ends_once_if_clients_give_up() -> None:
    result = run(Fixed(1), rate=12.0, engine=Engine(A100_8B, GPU.targets, patience=5.0))
    arrivals = sorted(arrival.time for arrival in result.scenario.trace.arrivals(1))
    assert sorted([row[0] for row in result.log.served] + result.log.lost) == arrivals
    assert len(result.log.lost) > 100
    assert max(first - arrival for arrival, first, _, _ in result.log.served) < 10


def test_clients_that_retry_add_load_and_are_never_counted_twice() -> None:
    once, again = (
        run(Fixed(1), rate=12.0, engine=Engine(A100_8B, GPU.targets, patience=5.0, retries=retries))
        for retries in (0, 2)
    )
    arrivals = sorted(arrival.time for arrival in again.scenario.trace.arrivals(1))
    ended = sorted([row[0] for row in again.log.served] + again.log.lost)
    assert ended == pytest.approx(arrivals), "a request counts from its first attempt"
    waits = [max(first - arrival for arrival, first, _, _ in result.log.served) for result in (once, again)]
    assert waits[0] < 8 < waits[1]


def test_a_comparison_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    def result(attainment: float) -> Figures:
        return Figures(attainment, 1.0, 0.1, 0.2, 0.0, 3.0, 4.0, 5)

    def fail() -> Figures:
        raise AssertionError("this run is in the file")

    path, settings_ = tmp_path / "runs.json", {"start": 60.0}
    run_all([(("step", "KubeAI, 1", 1), lambda: result(0.25))], Store(path, settings_), jobs=1)
    store = Store(path, settings_)
    store.load()
    run_all([(("step", "KubeAI, 1", 1), fail), (("step", "KubeAI, 1", 2), lambda: result(0.5))], store, jobs=2)
    store = Store(path, settings_)
    store.load()
    assert [store.runs["step", "KubeAI, 1", seed].attainment for seed in (1, 2)] == [0.25, 0.5]
    with pytest.raises(SystemExit, match="other settings"):
        Store(path, {"start": 300.0}).load()


def test_a_rival_is_compared_over_the_seeds_that_both_have_and_at_no_more_cost() -> None:
    def row(family: str, *runs: tuple[float, float]) -> Row:
        configuration = PolicyConfiguration(family, "default", False, lambda _: Fixed(1))
        return Row(
            trace, configuration, tuple(Figures(share, 1.0, 0.1, 0.2, 0.0, cost, 4.0, 5) for share, cost in runs)
        )

    trace = traces(1.0, 60.0)[0]
    ours = row(OURS, (0.9, 3.0), (0.7, 1.0))
    one_seed, too_dear = row("KubeAI", (0.85, 2.5)), row("Knative", (0.95, 2.5), (0.95, 2.5))
    (verdict,) = verdicts([ours, one_seed, too_dear])
    assert verdict.rival == one_seed
    assert verdict.paired == ours.first(1)
    (alone,) = verdicts([ours, too_dear])
    assert (alone.rival, alone.paired) == (None, ours)
    (known,) = verdicts([ours, row(CONSTANT, (0.5, 1.0)), row(CONSTANT, (0.6, 2.0), (0.9, 2.0))])
    assert (len(known.same.runs), known.constant) == (1, 0.6), "the baselines too"


def test_stored_rows_need_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "limits_of", lambda *_: Limits(1.0, 1000.0))
    run = Figures(0.5, 1.0, 0.1, 0.2, 0.0, 3.0, 4.0, 5)
    grid = Grid(engine=GPU, traces=traces(1.0, 60.0)[:1], seeds=9, only=["Constant fleet, 2"])
    found = Store(None, {}, {("poisson", "Constant fleet, 2", seed): run for seed in (1, 2, 4)})
    assert [len(row.runs) for row in stored(grid, found)] == [2], "seeds without a gap"


def test_the_operator_in_the_simulator_knows_only_what_pods_and_metrics_show() -> None:
    subject = operator()
    run(subject, rate=9.0, seconds=240.0, gpus=8)
    (learned,) = {starts.load for starts in [subject.starts.expected("")] if starts is not None}
    assert 10 <= learned <= 20
    assert learned == int(learned), "Kubernetes' times have whole seconds"
    exact = A100_8B.coefficients
    for sample in subject.record.samples.values():
        assert sample.step_model != exact, "the engine fits its step times"
        assert sample.step_model == pytest.approx(exact, rel=0.5)


def test_the_operator_replaces_a_pod_that_never_becomes_ready_and_removes_it() -> None:
    # Longer than the first scale-down window, in which nothing is removed.
    plain = run(operator(), rate=12.0, seconds=360.0, gpus=8)
    stuck = run(operator(), rate=12.0, seconds=360.0, gpus=8, stuck=frozenset({3}))
    last, size = stuck.samples[-1], plain.samples[-1].desired_replicas
    assert plain.samples[-1].ready == last.ready == last.desired_replicas == size
    assert max(sample.desired_replicas for sample in stuck.samples) == size + 1


def test_the_operator_names_a_straggler_and_keeps_the_size_of_the_fleet() -> None:
    subject = operator()
    result = run(subject, rate=9.0, seconds=400.0, gpus=8, slow={2: 3.0})
    (straggler,) = subject.record.speeds.stragglers
    assert straggler.pod == "2"
    assert max(sample.desired_replicas for sample in result.samples) <= 5


def test_the_clairvoyant_policy_orders_replicas_one_start_ahead_and_bridges_short_lulls() -> None:
    busy = [*range(100, 200), *range(230, 300), *range(600, 700)]
    plan = clairvoyant(
        [Arrival(float(second), 90, 10) for second in busy], 50.0, 1.0, 60.0, 90.0, seconds=800.0, most=8
    )
    wanted = [plan.plan[int(second / plan.period)] for second in (30, 45, 150, 215, 299, 400, 545, 650, 750)]
    assert wanted == [1, 2, 2, 2, 2, 1, 2, 2, 1]


def test_an_interval_covers_the_mean_with_students_quantile() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.30 / 3**0.5)
    assert found.show(100, 0) == "200 ± 248"
    assert interval([1.0]).show(1, 1) == "1.0"


def test_a_router_sees_the_present_load_of_all_replicas() -> None:
    """With the load of their last request, idle replicas would look busy, and the busy one would get all requests."""
    log, pods = RequestLog(), []
    for name in ("short", "long"):
        pods.append(Pod(name, 0.0, replica=ApproximateReplica(GPU, log, 0.0)))
    for pod, generate, requests in zip(pods, (5, 2000), (3, 1), strict=True):
        assert pod.replica is not None
        for _ in range(requests):
            pod.replica.add(Arrival(0.0, 100, generate))
        assert pod.replica.in_flight == requests
    rng = random.Random(1)
    assert {least_loaded_of_all(rng, pods, 0.0).name} == {"long"}
    assert {least_loaded_of_all(rng, pods, 4.0).name} == {"short"}
    assert {least_loaded(rng, pods, 4.0).name for _ in range(20)} == {"short", "long"}, "twice the same pod, at times"


def test_the_fleet_holds_at_most_the_clusters_gpus() -> None:
    result = run(Fixed(8), gpus=3, rate=10.0)
    edges = sorted([(begin, 1) for begin, _ in result.gpu_intervals] + [(end, -1) for _, end in result.gpu_intervals])
    held = most = 0
    for _, change in edges:
        held += change
        most = max(most, held)
    assert most == 3


def test_a_pod_deleted_while_it_starts_never_serves() -> None:
    class UpAndDown:
        period = 5.0

        def observe(self, view: View) -> int:
            return 6 if view.now == 5.0 else 2

    result = run(UpAndDown(), gpus=8)
    assert max(sample.ready for sample in result.samples) == 2


def play(make: MakeReplica, engine: Engine, arrivals: list[Arrival]) -> tuple[RequestLog, ReplicaMetrics, float]:
    log = RequestLog()
    replica = make(engine, log, 0.0)
    for arrival in arrivals:
        replica.run_until(arrival.time)
        replica.add(arrival)
    end = replica.drain(1e6)
    return log, replica.metrics("pod", end), end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "mix", "rate", "seconds"),
    [
        *(
            pytest.param(engine, *load, id=f"{name}, {engine.device.steps_in_flight} in flight")
            for engine in (GPU, ASYNCHRONOUS)
            for name, load in {
                "conversation, half full": (AZURE_CONVERSATION, 3.0, 60.0),
                "conversation, overloaded": (AZURE_CONVERSATION, 7.0, 60.0),
                "code, long prompts": (AZURE_CODE, 3.0, 60.0),
                "many short ones": (BURST_GPT, 40.0, 30.0),
            }.items()
        ),
        pytest.param(
            CONTEXTS, Mix(Lengths(12_000, 15_000, 40_000), Lengths(129, 211, 1000)), 0.4, 120.0, id="contexts"
        ),
        pytest.param(CPU, Mix(Lengths(200, 300, 2000), Lengths(60, 80, 500)), 1.5, 200.0, id="two cores"),
    ],
)
def test_the_approximate_replica_is_within_three_percent_or_a_step_of_the_real_scheduler(
    engine: Engine, mix: Mix, rate: float, seconds: float
) -> None:
    arrivals = poisson(mix, rate, seconds)
    (real, metrics, end), (approximate, approximate_metrics, approximate_end) = (
        play(make, engine, arrivals) for make in (ExactReplica, ApproximateReplica)
    )
    assert len(real.served) == len(approximate.served) == len(arrivals)
    assert approximate_end == pytest.approx(end, rel=0.03)
    assert approximate_metrics.steps == pytest.approx(metrics.steps, rel=0.03)
    assert approximate_metrics.scheduled_prefill_tokens == metrics.scheduled_prefill_tokens
    assert approximate_metrics.scheduled_decode_tokens == metrics.scheduled_decode_tokens
    first, ended = (
        [sorted(row[place] - row[0] for row in log.served) for log in (real, approximate)] for place in (1, 2)
    )
    for share in (0.5, 0.9):
        assert around(first[1], share) == pytest.approx(around(first[0], share), rel=0.03, abs=engine.targets.gap)
        # A request that arrives while two steps are in flight joins the step after both.
        ahead = engine.targets.gap * (engine.device.steps_in_flight - 1)
        assert around(ended[1], share) == pytest.approx(around(ended[0], share), rel=0.03, abs=ahead)


def around(times: list[float], share: float) -> float:
    """Return the mean of an eighth of the times, around a quantile.

    One request that is computed a step later can move a quantile by several percent.
    """
    place, width = int(share * len(times)), len(times) // 16
    return statistics.fmean(times[place - width : place + width + 1])


def test_a_replica_gives_the_same_results_whenever_it_is_observed() -> None:
    arrivals = poisson(AZURE_CONVERSATION, 6.0, 60.0)
    logs = []
    for every in (1, 7, 1000):
        log = RequestLog()
        replica = ApproximateReplica(GPU, log, 0.0)
        for number, arrival in enumerate(arrivals):
            replica.run_until(arrival.time)
            replica.add(arrival)
            if number % every == 0:
                assert replica.in_flight > 0
        replica.drain(1e6)
        logs.append(sorted(log.served))
    assert len(logs[0]) == len(arrivals)
    assert logs[0] == logs[1] == logs[2]


def test_a_replica_with_a_full_queue_rejects_and_counts_requests() -> None:
    engine = Engine(A100_8B, GPU.targets, max_queued=3)
    for make in (ExactReplica, ApproximateReplica):
        log, metrics, _ = play(make, engine, [Arrival(0.0, 4000, 4) for _ in range(10)])
        assert len(log.lost) == metrics.rejected > 0
        assert len(log.served) + len(log.lost) == 10


def test_a_drain_aborts_requests_at_its_deadline() -> None:
    for make in (ExactReplica, ApproximateReplica):
        log = RequestLog()
        replica = make(GPU, log, 0.0)
        replica.add(Arrival(0.0, 100, 10_000))
        assert replica.drain(5.0) == 5.0
        assert log.lost == [0.0]


def test_the_generated_traces_have_the_published_token_counts() -> None:
    rng = random.Random(1)
    for lengths in (AZURE_CONVERSATION.prompt, AZURE_CODE.prompt, AZURE_CONVERSATION.generate):
        assert isinstance(lengths, Lengths)
        drawn = sorted(lengths.draw(rng) for _ in range(20_000))
        assert drawn[10_000] == pytest.approx(lengths.median, rel=0.05)
        assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.05)
    for trace in traces(0.2, 120.0):
        times = [arrival.time for arrival in trace.arrivals(1)]
        assert times == sorted(times)
        assert times == [arrival.time for arrival in trace.arrivals(1)]


def view(now: float, waiting: int, running: int, *, ready: int, desired_replicas: int) -> View:
    log = RequestLog()
    replicas = []
    for pod in range(ready):
        metrics = ApproximateReplica(GPU, log, now).metrics(str(pod), now)
        metrics.waiting, metrics.running = waiting, running
        replicas.append(metrics)
    return View(now, tuple(replicas), frozenset(map(str, range(ready))), (), None, 0, desired_replicas)


def decisions(policy: Policy, views: Callable[[float], View], seconds: float) -> list[int]:
    return [policy.observe(views(step * policy.period)) for step in range(1, int(seconds / policy.period) + 1)]


def test_the_hpa_has_ten_percent_tolerance_and_a_five_minute_scale_down_window() -> None:
    assert decisions(WaitingRequests(5.0), lambda now: view(now, 5, 9, ready=4, desired_replicas=4), 15)[-1] == 4
    assert decisions(WaitingRequests(5.0), lambda now: view(now, 10, 9, ready=4, desired_replicas=4), 15)[-1] == 8
    assert (
        decisions(WaitingRequests(5.0), lambda now: view(now, 500, 9, ready=4, desired_replicas=4), 15)[-1] == 8
    )  # at most 4 or double
    behavior = Behavior()
    assert [behavior.limit(now, 6, 6 if now < 15 else 2) for now in (0.0, 15.0, 300.0, 316.0)] == [6, 6, 2, 2]


def test_knative_panics_at_twice_its_target_and_does_not_scale_down_meanwhile() -> None:
    policy = Concurrency(10.0)
    calm = decisions(policy, lambda now: view(now, 0, 10, ready=2, desired_replicas=2), 60)
    assert calm[-1] == 2
    assert policy.observe(view(62.0, 90, 10, ready=2, desired_replicas=2)) > 2
    peak = policy.observe(view(64.0, 90, 10, ready=2, desired_replicas=2))
    assert policy.observe(view(66.0, 0, 0, ready=2, desired_replicas=peak)) >= peak


def test_results_exclude_the_warm_up() -> None:
    trace = traces(0.25, 60.0)[0]
    result = simulate(Scenario(trace=trace, engine=GPU, cluster=Cluster(), begin=2), Fixed(2))
    got = figures(result)
    assert got.gpu_hours == pytest.approx(2 * 60 / 3600)
    assert got.changes_per_hour == 0
    assert got.attainment > 0.95


@pytest.mark.slow
def test_a_large_fleet_is_simulated_in_seconds() -> None:
    device = Device(
        name="small", base=0.05, token=0.0005, kv_token=0.0, token_budget=256, max_sequences=64, kv_tokens=9999
    )
    arrivals = poisson(Mix(Lengths(200, 250, 1000), Lengths(20, 30, 100)), 1000.0, 15.0)
    scenario = Scenario(
        trace=short(arrivals, 15.0), engine=Engine(device, CPU.targets), cluster=Cluster(), begin=1000, most=1000,
        routing=balanced(random_pod),
    )  # fmt: skip
    result = simulate(scenario, Fixed(1000))
    assert len(result.log.served) == len(arrivals)
    assert result.samples[-1].ready == 1000


@pytest.mark.slow
def test_the_quick_comparison_prints_a_table() -> None:
    # One run of a small constant fleet: on a cold cache, most of the time is compilation.
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "benchmarks.autoscaling", "--quick", "--jobs", "1", "--scale", "0.2"]
    command += ["--policy", "Constant fleet, 2"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=True)
    assert "| Constant fleet, 2 |" in done.stdout
    assert "1 runs in" in done.stdout
