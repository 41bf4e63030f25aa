"""The dashboard of one FastGenDeployment and its engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.base import choices, new_dashboard, one_deployment, with_events
from dashboards.panels import lines, mean, number, quantiles, rate, stacked, word
from fastgen_operator.autoscale.scrape.outcomes import FAILED, FAULTS

_ENGINES: Final = '{namespace="$namespace",fastgen_dev_deployment="$deployment",pod=~"$pod"}'
# Those of a canary, too.
_REVISIONS: Final = '{namespace="$namespace",fastgen_dev_deployment=~"$deployment(_canary)?"}'
_REVISION: Final = "{{fastgen_dev_deployment}}"
_OPERATOR: Final = '{namespace="$namespace",name="$deployment"}'


def build_deployment() -> Dashboard:
    """Build the dashboard, with variables for data source, namespace, FastGenDeployment and pods."""
    dashboard = one_deployment(
        new_dashboard("Deployment", "State, latency, token budget and engines of one FastGenDeployment.")
    ).with_variable(
        choices(
            "pod",
            "Pod",
            'label_values(fastgen_token_budget{namespace="$namespace",fastgen_dev_deployment="$deployment"}, pod)',
        )
    )
    dashboard = with_events(dashboard, _OPERATOR)
    return _memory(_steps(_canary(_requests(_latency(_budget(_overview(dashboard)))))))


def _rate(metric: str) -> str:
    return rate(metric, _ENGINES)


def _overview(dashboard: Dashboard) -> Dashboard:
    ready = f'max by (status, reason) (fastgen_operator_condition{{type="Ready",{_OPERATOR[1:]})'
    return (
        dashboard.with_row(Row("Overview"))
        .with_panel(word("Ready", "Status and reason of the condition Ready.", {"{{status}}: {{reason}}": ready}))
        .with_panel(
            number(
                "Replicas",
                "Ready replicas of the current pod template, and desired replicas.",
                "none",
                {
                    "ready": f"max(fastgen_operator_ready_replicas{_OPERATOR})",
                    "desired": f"max(fastgen_operator_desired_replicas{_OPERATOR})",
                },
            )
        )
        .with_panel(
            word(
                "Engines",
                "Version, device and dtype of the engines.",
                {
                    "{{version}} {{device}} {{dtype}}": "count by (version, device, dtype) "
                    f"(fastgen_engine_info{_ENGINES})"
                },
            )
        )
        .with_panel(
            number(
                "Backlog",
                "Prompt tokens not yet computed.",
                "short",
                {"tokens": f"sum(fastgen_backlog_prompt_tokens{_ENGINES})"},
            )
        )
        .with_panel(
            number(
                "Time to first token, p95",
                "95th percentile of the time from a request's arrival to its first token.",
                "s",
                {"seconds": quantiles("fastgen_time_to_first_token_seconds", _ENGINES)["p95"]},
            )
        )
        .with_panel(
            number(
                "Tokens per second",
                "Prompt and generated tokens computed per second.",
                "short",
                {"tokens/s": f"sum({_rate('fastgen_scheduled_tokens_total')})"},
            )
        )
    )


def _budget(dashboard: Dashboard) -> Dashboard:
    full = f"sum({_rate('fastgen_step_seconds_count')} * fastgen_token_budget{_ENGINES})"
    filled = f"sum by (phase) ({_rate('fastgen_scheduled_tokens_total')}) / ignoring(phase) group_left {full}"
    return (
        dashboard.with_row(Row("Load"))
        .with_panel(
            stacked(
                "Budget fill by phase",
                "Share of the token budget that steps used. Full steps and a growing backlog: the replicas are at "
                "their capacity.",
                "percentunit",
                {"{{phase}}": filled},
            ).max(1)
        )
        .with_panel(
            lines(
                "Backlog",
                "Prompt tokens not yet computed, of queued and partially prefilled requests, by pod.",
                "short",
                {"{{pod}}": f"sum by (pod) (fastgen_backlog_prompt_tokens{_ENGINES})"},
            )
        )
        .with_panel(
            lines(
                "Sequences",
                "Sequences that run, wait, or are swapped out to host memory, and open HTTP requests.",
                "short",
                {state: f"sum(fastgen_num_requests_{state}{_ENGINES})" for state in ("running", "waiting", "swapped")}
                | {"open": f"sum(fastgen_http_requests_open{_ENGINES})"},
            )
        )
        .with_panel(
            lines(
                "Prompt tokens",
                "Prompt tokens per second: arrived; rejected because the queue was full; cancelled before the first "
                "token; and answered, whether computed or found in the prefix cache.",
                "short",
                {
                    "arrived": f"sum({_rate('fastgen_arrived_prompt_tokens_total')})",
                    "rejected": f"sum({_rate('fastgen_rejected_prompt_tokens_total')})",
                    "cancelled": f"sum({_rate('fastgen_cancelled_prompt_tokens_total')})",
                    "answered": f"sum({_rate('fastgen_prompt_tokens_total')})",
                },
            )
        )
    )


def _latency(dashboard: Dashboard) -> Dashboard:
    panels = (
        ("Time to first token", "Time from a request's arrival to its first token.", "time_to_first_token_seconds"),
        ("Inter-token latency", "Time between consecutive tokens of a response.", "inter_token_latency_seconds"),
        (
            "Time in the queue",
            "Time from a request's arrival in the engine to its first step.",
            "request_queue_seconds",
        ),
        ("Duration of requests", "Time from a request's arrival to its end.", "e2e_request_latency_seconds"),
    )
    dashboard = dashboard.with_row(Row("Latency"))
    for title, description, metric in panels:
        dashboard = dashboard.with_panel(lines(title, description, "s", quantiles(f"fastgen_{metric}", _ENGINES)))
    return dashboard.with_panel(
        lines(
            "Oldest request in the queue",
            "Waiting time of the oldest queued request, by pod.",
            "s",
            {"{{pod}}": f"max by (pod) (fastgen_oldest_waiting_seconds{_ENGINES})"},
        )
    ).with_panel(
        lines(
            "Mean latencies",
            "Mean time to the first token and mean time between tokens.",
            "s",
            {
                "first token": mean("fastgen_time_to_first_token_seconds", _ENGINES),
                "inter-token": mean("fastgen_inter_token_latency_seconds", _ENGINES),
            },
        )
    )


def _requests(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Requests"))
        .with_panel(
            stacked(
                "Finished requests",
                "Finished requests per second by finish reason.",
                "reqps",
                {"{{finish_reason}}": f"sum by (finish_reason) ({_rate('fastgen_request_success_total')})"},
            )
        )
        .with_panel(
            stacked(
                "Rejected requests",
                "Rejected requests per second by reason.",
                "reqps",
                {"{{reason}}": f"sum by (reason) ({_rate('fastgen_request_rejected_total')})"},
            )
        )
        .with_panel(
            lines(
                "Prompt length",
                "Prompt tokens per finished request.",
                "short",
                quantiles("fastgen_request_prompt_tokens", _ENGINES),
            )
        )
        .with_panel(
            lines(
                "Length of responses",
                "Generated tokens per finished request, and generated tokens per second.",
                "short",
                {
                    **quantiles("fastgen_request_generation_tokens", _ENGINES),
                    "tokens/s": f"sum({_rate('fastgen_generation_tokens_total')})",
                },
            )
        )
    )


def _canary(dashboard: Dashboard) -> Dashboard:
    def by_revision(metric: str, label: str = "", values: Iterable[str] = ()) -> str:
        chosen = f'{_REVISIONS[:-1]},{label}=~"{"|".join(sorted(values))}"}}' if label else _REVISIONS
        return f"sum by (fastgen_dev_deployment) ({rate(f'fastgen_{metric}', chosen)})"

    def or_zero(expression: str) -> str:
        return f"({expression} or 0 * {by_revision('request_success_total')})"

    def mean_by_revision(histogram: str) -> str:
        return f"{by_revision(f'{histogram}_sum')} / {by_revision(f'{histogram}_count')}"

    # As the operator counts them when it compares the revisions.
    faults = or_zero(by_revision("request_rejected_total", "reason", FAULTS))
    failed = or_zero(by_revision("request_success_total", "finish_reason", FAILED))
    ended = f"({by_revision('request_success_total')} + {faults})"
    return (
        dashboard.with_row(Row("Canary"))
        .with_panel(
            stacked(
                "Share of the requests by revision",
                "Share of the requests that each revision has answered. The canary has the name that ends in _canary.",
                "percentunit",
                {_REVISION: f"{ended} / on () group_left () sum({ended})"},
            ).max(1)
        )
        .with_panel(
            lines(
                "Failed requests by revision",
                "Share of the requests of each revision that failed through no fault of the client. A canary above "
                "maxErrorPercent is rolled back.",
                "percentunit",
                {_REVISION: f"({failed} + {faults}) / {ended}"},
            )
        )
        .with_panel(
            lines(
                "Mean time to first token by revision",
                "Mean time from a request's arrival to its first token.",
                "s",
                {_REVISION: mean_by_revision("time_to_first_token_seconds")},
            )
        )
        .with_panel(
            lines(
                "Mean inter-token latency by revision",
                "Mean time between consecutive tokens of a response.",
                "s",
                {_REVISION: mean_by_revision("inter_token_latency_seconds")},
            )
        )
    )


def _steps(dashboard: Dashboard) -> Dashboard:
    def coefficient(name: str) -> str:
        return f'fastgen_step_model{{coefficient="{name}",{_ENGINES[1:]}'

    predicted = (
        f"{coefficient('base')} + on (pod) {coefficient('token')} * on (pod) fastgen_token_budget{_ENGINES} "
        f"+ on (pod) {coefficient('kv_token')} * on (pod) fastgen_kv_cache_tokens{_ENGINES}"
    )
    return (
        dashboard.with_row(Row("Steps"))
        .with_panel(lines("Duration of steps", "Duration of a step.", "s", quantiles("fastgen_step_seconds", _ENGINES)))
        .with_panel(lines("Tokens per step", "Tokens in a step.", "short", quantiles("fastgen_step_tokens", _ENGINES)))
        .with_panel(
            lines(
                "Predicted duration of a full step",
                "Duration of a step with the whole token budget, at the beginning of prompts, and the present KV "
                "cache, by the engine's step model. A replica far above the others is slow.",
                "s",
                {"{{pod}}": predicted},
            )
        )
        .with_panel(
            stacked(
                "Steps by CUDA graph",
                "Steps per second that were replayed from a CUDA graph, and those that were not, by reason.",
                "ops",
                {
                    "graph": f"sum({_rate('fastgen_graph_steps_total')})",
                    "no graph: {{reason}}": f"sum by (reason) ({_rate('fastgen_eager_steps_total')})",
                },
            )
        )
    )


def _memory(dashboard: Dashboard) -> Dashboard:
    hits, queries = (f"sum({_rate(f'fastgen_prefix_cache_{name}_tokens_total')})" for name in ("hit", "query"))
    return (
        dashboard.with_row(Row("KV cache"))
        .with_panel(
            lines(
                "KV cache utilization",
                "Share of the KV cache's blocks in use, by pod. Near 100 %, sequences are preempted.",
                "percentunit",
                {"{{pod}}": f"max by (pod) (fastgen_kv_cache_usage_ratio{_ENGINES})"},
            ).max(1)
        )
        .with_panel(
            lines(
                "Tokens in the KV cache",
                "Tokens held, and the capacity, over all replicas.",
                "short",
                {
                    "held": f"sum(fastgen_kv_cache_tokens{_ENGINES})",
                    "capacity": f"sum(fastgen_kv_cache_capacity_tokens{_ENGINES})",
                },
            )
        )
        .with_panel(
            lines(
                "Prefix cache",
                "Share of the prompt tokens that were found in the prefix cache.",
                "percentunit",
                {"hits": f"{hits} / {queries}"},
            ).max(1)
        )
        .with_panel(
            stacked(
                "Preemptions and steps without memory",
                "Preempted sequences per second by mode, and steps per second that ran out of memory.",
                "short",
                {
                    "preempted: {{mode}}": f"sum by (mode) ({_rate('fastgen_preemptions_total')})",
                    "out of memory": f"sum({_rate('fastgen_steps_out_of_memory_total')})",
                },
            )
        )
    )
