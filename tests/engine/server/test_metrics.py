"""What Prometheus reads, over the scripted engine."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.server.serving import Serving, wait_until

NAMES = {
    "gauge": """num_requests_running num_requests_waiting kv_cache_usage_ratio kv_cache_tokens kv_cache_capacity_tokens
        token_budget backlog_prompt_tokens oldest_waiting_seconds cache_config_info engine_info""",
    "counter": """scheduled_tokens prompt_tokens generation_tokens preemptions request_success request_rejected""",
    "histogram": """step_tokens step_seconds time_to_first_token_seconds inter_token_latency_seconds
        e2e_request_latency_seconds request_queue_seconds request_prompt_tokens request_generation_tokens""",
}


def test_the_agreed_names_and_types_are_there(scripted: Serving) -> None:
    scripted.post("/v1/completions", {"prompt": "a", "n": 2})  # request_rejected has no sample before a rejection
    families = {f.name: f for f in text_string_to_metric_families(scripted.get("/metrics").text)}
    for kind, names in NAMES.items():
        for name in names.split():
            assert families[f"fastgen_{name}"].type == kind, name
            assert all(s.labels["model_name"] == "smollm2" for s in families[f"fastgen_{name}"].samples)


def test_a_request_is_counted(scripted: Serving) -> None:
    def now() -> dict[str, float]:
        return {
            "prompt": scripted.metric("fastgen_prompt_tokens_total"),
            "generated": scripted.metric("fastgen_generation_tokens_total"),
            "prefill": scripted.metric("fastgen_scheduled_tokens_total", phase="prefill"),
            "decode": scripted.metric("fastgen_scheduled_tokens_total", phase="decode"),
            "first": scripted.metric("fastgen_time_to_first_token_seconds_count"),
            "gaps": scripted.metric("fastgen_inter_token_latency_seconds_count"),
            "queued": scripted.metric("fastgen_request_queue_seconds_count"),
            "passes": scripted.metric("fastgen_step_tokens_count"),
            "forward": scripted.metric("fastgen_step_tokens_sum"),
            "length": scripted.metric("fastgen_request_success_total", finish_reason="length"),
            "ended": scripted.metric("fastgen_e2e_request_latency_seconds_count"),
        }

    before = now()
    assert scripted.post("/v1/completions", {"prompt": [504, 504, 504], "max_tokens": 5}).status_code == 200
    after = now()
    assert {name: after[name] - before[name] for name in before} == {
        "prompt": 3,
        "generated": 5,
        "prefill": 3,
        "decode": 4,
        "first": 1,
        "gaps": 4,
        "queued": 1,
        "passes": 5,
        "forward": 7,
        "length": 1,
        "ended": 1,
    }


def test_refusals_are_counted_by_reason(scripted: Serving) -> None:
    scripted.post("/v1/completions", {"model": "nobody", "prompt": "a"})
    before = scripted.metric("fastgen_request_rejected_total", reason="model_not_found")
    scripted.post("/v1/completions", {"model": "nobody", "prompt": "a"})
    assert scripted.metric("fastgen_request_rejected_total", reason="model_not_found") == before + 1


def test_what_does_not_change_is_described(scripted: Serving) -> None:
    assert scripted.metric("fastgen_cache_config_info", block_size="64", num_blocks="64") == 1
    assert scripted.metric("fastgen_engine_info", device="cpu", dtype="float32") == 1
    assert scripted.metric("fastgen_kv_cache_capacity_tokens") == 64 * 64
    assert scripted.metric("fastgen_token_budget") == 256


def test_token_latencies_begin_at_a_millisecond(scripted: Serving) -> None:
    text = scripted.get("/metrics").text
    assert 'fastgen_inter_token_latency_seconds_bucket{le="0.001",model_name="smollm2"}' in text
    assert 'fastgen_inter_token_latency_seconds_bucket{le="0.0025",model_name="smollm2"}' in text


def test_the_format_is_the_one_asked_for(scripted: Serving) -> None:
    plain = scripted.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    opened = scripted.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert opened.headers["content-type"].startswith("application/openmetrics-text")
    assert opened.text.endswith("# EOF\n")
    assert any(f.name == "fastgen_token_budget" for f in parse_openmetrics(opened.text))


def test_all_is_quiet_when_nothing_runs(scripted: Serving) -> None:
    scripted.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_tokens", "kv_cache_usage_ratio"):
        wait_until(lambda name=name: scripted.metric(f"fastgen_{name}") == 0, name)  # type: ignore[misc]
    assert scripted.metric("fastgen_backlog_prompt_tokens") == 0
