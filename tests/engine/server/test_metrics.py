"""Metrics of the server with the scripted engine."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.server.serving import Serving
from fastgen.core.request import FinishReason
from fastgen.core.stats import SchedulerStats, StepStats
from fastgen.core.step_times import StepCoefficients
from fastgen.link.messages import EngineInfo, StepReport
from fastgen.server.serving.metrics import Metrics
from support.waiting import wait_until

# The contract with the operator, the dashboards and gateways: type, and labels besides model_name.
TABLE: dict[str, tuple[str, set[str]]] = {
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "num_requests_swapped": ("gauge", set()),
    "http_requests_open": ("gauge", set()),
    "kv_cache_usage_ratio": ("gauge", set()),
    "kv_cache_tokens": ("gauge", set()),
    "kv_cache_capacity_tokens": ("gauge", set()),
    "token_budget": ("gauge", set()),
    "backlog_prompt_tokens": ("gauge", set()),
    "oldest_waiting_seconds": ("gauge", set()),
    "step_model": ("gauge", {"coefficient"}),
    # The text format has no info type and exposes a gauge of 1.
    "cache_config_info": ("gauge", {"block_size", "num_blocks"}),
    "engine_info": ("gauge", {"version", "device", "dtype", "quantization"}),
    # The parser strips _total from counters.
    "scheduled_tokens": ("counter", {"phase"}),
    "arrived_prompt_tokens": ("counter", set()),
    "rejected_prompt_tokens": ("counter", set()),
    "cancelled_prompt_tokens": ("counter", set()),
    "prompt_tokens": ("counter", set()),
    "generation_tokens": ("counter", set()),
    "prefix_cache_query_tokens": ("counter", set()),
    "prefix_cache_hit_tokens": ("counter", set()),
    "preemptions": ("counter", {"mode"}),
    "steps_out_of_memory": ("counter", set()),
    "graph_steps": ("counter", set()),
    "eager_steps": ("counter", {"reason"}),
    "request_success": ("counter", {"finish_reason"}),
    "request_rejected": ("counter", {"reason"}),
    "step_tokens": ("histogram", set()),
    "step_seconds": ("histogram", set()),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "request_queue_seconds": ("histogram", set()),
    "request_prompt_tokens": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
}
VALUES = {
    "phase": {"prefill", "decode"},
    "mode": {"recompute", "swap"},
    "finish_reason": {"stop", "length", "abort", "deadline", "out_of_memory", "grammar", "rejected"},
    "coefficient": {"base", "token", "kv_token", "context_pair"},
}


def test_metric_names_types_and_labels_match_the_contract(scripted: Serving) -> None:
    scripted.post("/v1/completions", {})  # request_rejected has no sample before a rejection
    families = {
        f.name.removeprefix("fastgen_"): f for f in text_string_to_metric_families(scripted.get("/metrics").text)
    }
    assert {name: family.type for name, family in families.items()} == {name: kind for name, (kind, _) in TABLE.items()}
    for name, (_, labels) in TABLE.items():
        samples = families[name].samples
        assert samples, name
        for sample in samples:
            assert set(sample.labels) - {"le"} == {"model_name", *labels}, name
            assert sample.labels["model_name"] == "smollm2"
        for label in labels & set(VALUES):
            assert {sample.labels[label] for sample in samples} == VALUES[label]


def test_a_request_updates_the_counters(scripted: Serving) -> None:
    def now() -> dict[str, float]:
        return {
            "arrived": scripted.metric("fastgen_arrived_prompt_tokens_total"),
            "rejected": scripted.metric("fastgen_rejected_prompt_tokens_total"),
            "cancelled": scripted.metric("fastgen_cancelled_prompt_tokens_total"),
            "prompt": scripted.metric("fastgen_prompt_tokens_total"),
            "generated": scripted.metric("fastgen_generation_tokens_total"),
            "prefill": scripted.metric("fastgen_scheduled_tokens_total", phase="prefill"),
            "decode": scripted.metric("fastgen_scheduled_tokens_total", phase="decode"),
            "first": scripted.metric("fastgen_time_to_first_token_seconds_count"),
            "gaps": scripted.metric("fastgen_inter_token_latency_seconds_count"),
            "queued": scripted.metric("fastgen_request_queue_seconds_count"),
            "steps": scripted.metric("fastgen_step_tokens_count"),
            "eager": scripted.metric("fastgen_eager_steps_total", reason="off"),
            "replayed": scripted.metric("fastgen_graph_steps_total"),
            "forward": scripted.metric("fastgen_step_tokens_sum"),
            "length": scripted.metric("fastgen_request_success_total", finish_reason="length"),
            "ended": scripted.metric("fastgen_e2e_request_latency_seconds_count"),
        }

    wait_until(lambda: scripted.metric("fastgen_num_requests_running") == 0, "the end of other tests' requests")
    before = now()
    assert scripted.post("/v1/completions", {"prompt": [504, 504, 504], "max_tokens": 5}).status_code == 200
    after = now()
    assert {name: after[name] - before[name] for name in before} == {
        "arrived": 3,
        "rejected": 0,
        "cancelled": 0,
        "prompt": 3,
        "generated": 5,
        "prefill": 3,
        "decode": 4,
        "first": 1,
        "gaps": 4,
        "queued": 1,
        "steps": 5,
        "eager": 5,
        "replayed": 0,
        "forward": 7,
        "length": 1,
        "ended": 1,
    }


def test_every_generation_of_a_request_counts_as_arrived(scripted: Serving) -> None:
    before = scripted.metric("fastgen_arrived_prompt_tokens_total")
    body = {"prompt": [[504, 504, 504], [504]], "n": 2, "max_tokens": 1}
    assert scripted.post("/v1/completions", body).status_code == 200
    assert scripted.metric("fastgen_arrived_prompt_tokens_total") - before == 2 * (3 + 1)


def test_prefix_cache_hits_and_the_step_model_are_exported(scripted: Serving) -> None:
    prompt = [*range(600, 800)]

    def now() -> tuple[float, float]:
        names = ("query", "hit")
        queried, found = (scripted.metric(f"fastgen_prefix_cache_{name}_tokens_total") for name in names)
        return queried, found

    before = now()
    for _ in range(2):
        assert scripted.post("/v1/completions", {"prompt": prompt, "max_tokens": 9}).status_code == 200
    queried, found = now()
    assert (queried - before[0], found - before[1]) == (400, 192), "three blocks of 64, the second time"
    assert scripted.metric("fastgen_step_model") > 0, "a step takes some time"
    assert scripted.metric("fastgen_num_requests_swapped") == 0


def test_rejections_are_counted_by_reason(scripted: Serving) -> None:
    scripted.post("/v1/completions", {"model": "unknown", "prompt": "a"})
    before = scripted.metric("fastgen_request_rejected_total", reason="model_not_found")
    scripted.post("/v1/completions", {"model": "unknown", "prompt": "a"})
    assert scripted.metric("fastgen_request_rejected_total", reason="model_not_found") == before + 1


def test_info_metrics_describe_the_engine(scripted: Serving) -> None:
    assert scripted.metric("fastgen_cache_config_info", block_size="64", num_blocks="64") == 1
    assert scripted.metric("fastgen_engine_info", device="cpu", dtype="float32") == 1
    assert scripted.metric("fastgen_kv_cache_capacity_tokens") == 64 * 64
    assert scripted.metric("fastgen_token_budget") == 256


def test_inter_token_latency_buckets_start_at_one_millisecond(scripted: Serving) -> None:
    text = scripted.get("/metrics").text
    assert 'fastgen_inter_token_latency_seconds_bucket{le="0.001",model_name="smollm2"}' in text
    assert 'fastgen_inter_token_latency_seconds_bucket{le="0.0025",model_name="smollm2"}' in text


def test_the_exposition_format_follows_the_accept_header(scripted: Serving) -> None:
    plain = scripted.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    opened = scripted.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert opened.text.endswith("# EOF\n")
    assert any(f.name == "fastgen_token_budget" for f in parse_openmetrics(opened.text))


def test_gauges_are_zero_when_idle(scripted: Serving) -> None:
    scripted.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_ratio"):
        wait_until(lambda name=name: scripted.metric(f"fastgen_{name}") == 0, name)  # type: ignore[misc]
    wait_until(lambda: scripted.metric("fastgen_backlog_prompt_tokens") == 0, "backlog_prompt_tokens")


# Names, types and labels as vLLM's V1 engine exposes them.
VLLM = {
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "kv_cache_usage_perc": ("gauge", set()),
    "prefix_cache_queries": ("counter", set()),
    "prefix_cache_hits": ("counter", set()),
    "num_preemptions": ("counter", set()),
    "prompt_tokens": ("counter", set()),
    "generation_tokens": ("counter", set()),
    "request_success": ("counter", {"finished_reason"}),
    "iteration_tokens_total": ("histogram", set()),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_prompt_tokens": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
}


def metrics_with_values(compat: str) -> Metrics:
    metrics = Metrics("m", compat)
    info = EngineInfo(
        architecture="llama", device="cpu", dtype="float32", vocabulary_size=9, hidden_size=8, num_parameters=9,
        max_model_length=9,
        token_budget=9, max_sequences=9, block_size=64, num_blocks=10,
    )  # fmt: skip
    metrics.describe(info, "1")
    stats = StepStats(prefill_tokens=3, decode_tokens=1, preemptions=3, swapped_out=1, queue_seconds=[0.2])
    state = SchedulerStats(num_running=2, num_waiting=5, kv_blocks_used=4)
    metrics.record(StepReport([], stats, state, StepCoefficients()))
    metrics.first_token(0.3, 7)
    metrics.finished(FinishReason.STOP, 1.0, 7, 2)
    return metrics


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
def test_vllms_names_are_an_option(accept: str) -> None:
    text = metrics_with_values("vllm").expose(accept, 0)[0].decode()
    families = {
        f.name.removeprefix("vllm:"): f for f in text_string_to_metric_families(text) if f.name.startswith("vllm:")
    }
    for name, (kind, labels) in VLLM.items():
        family = families[name]
        assert (name, family.type) == (name, kind)
        own = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert own == {"model_name", "engine", *labels}
    values = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert values["vllm:num_requests_waiting"] == 5
    assert values["vllm:kv_cache_usage_perc"] == 0.4
    reasons = {sample.labels["finished_reason"] for sample in families["request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}
    assert values["vllm:num_preemptions_total"] == 3
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    assert "vllm:cache_config_info" in values
    assert "fastgen_num_requests_waiting" in text
    asked = ["vllm:num_requests_waiting", "vllm:generation_tokens_total", "fastgen_num_requests_running"]
    restricted = metrics_with_values("vllm").expose(accept, 0, asked)[0].decode()
    shown = {line.partition("{")[0] for line in restricted.splitlines() if line[0] != "#"}
    assert shown == set(asked), "a scraper may ask for some of them by name"
    plain = metrics_with_values("none").expose(accept, 0)[0].decode()
    assert "vllm" not in plain


def test_prompts_that_end_without_a_first_token_and_without_a_waiting_client_are_counted_as_cancelled() -> None:
    """The autoscaler leaves them out of the mean lengths."""
    metrics = Metrics("m")
    for reason in FinishReason:
        metrics.finished(reason, 1.0, 10, 0)
        metrics.finished(reason, 1.0, 100, 1)
    cancelled = metrics.registry.get_sample_value("fastgen_cancelled_prompt_tokens_total", {"model_name": "m"})
    assert cancelled == 10 * len({FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.REJECTED})


@pytest.mark.parametrize(("whole", "windows", "usage"), [(4, 1, 0.4), (4, 3, 0.75)])
def test_usage_is_that_of_the_blocks_that_are_scarcest(whole: int, windows: int, usage: float) -> None:
    metrics = Metrics("m", "none")
    info = EngineInfo(
        architecture="gemma3", device="cpu", dtype="float32", vocabulary_size=9, hidden_size=8, num_parameters=9,
        max_model_length=9,
        token_budget=9, max_sequences=9, block_size=64, num_blocks=10, num_window_blocks=4,
    )  # fmt: skip
    metrics.describe(info, "1")
    state = SchedulerStats(num_running=2, kv_blocks_used=whole, window_blocks_used=windows)
    metrics.record(StepReport([], StepStats(), state, StepCoefficients()))
    text = metrics.expose("", 0)[0].decode()
    values = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert values["fastgen_kv_cache_usage_ratio"] == usage
    assert values["fastgen_kv_cache_capacity_tokens"] == 640
