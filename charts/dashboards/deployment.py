"""One FastGenDeployment at a glance."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, VariableRefresh, VariableSort

from dashboards.panels import DATASOURCE, ENGINES, OPERATOR, lines, number, quantiles, rate, stacked, timeline, word


def build_dashboard() -> Dashboard:
    """The dashboard, with a choice of data source, namespace and FastGenDeployment."""
    dashboard = (
        Dashboard("FastGen deployment")
        .uid("fastgen-deployment")
        .description("One FastGenDeployment: what its engines are filled with, what waits, and how it is scaled.")
        .tags(["fastgen", "llm", "inference"])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_choice("namespace", "Namespace", "label_values(fastgen_operator_desired_replicas, namespace)"))
        .with_variable(
            _choice(
                "deployment",
                "Deployment",
                'label_values(fastgen_operator_desired_replicas{namespace="$namespace"}, name)',
            )
        )
    )
    return _scaling(_latency(_budget(_glance(dashboard))))


def _glance(dashboard: Dashboard) -> Dashboard:
    ready = f'max by (status, reason) (fastgen_operator_condition{{type="Ready",{OPERATOR[1:]})'
    return (
        dashboard.with_row(Row("At a glance"))
        .with_panel(word("Ready", "The condition Ready, and its reason.", {"{{status}}: {{reason}}": ready}))
        .with_panel(
            number(
                "Replicas",
                "Ready replicas of the current template, and those wanted.",
                "none",
                {
                    "ready": f"max(fastgen_operator_ready_replicas{OPERATOR})",
                    "desired": f"max(fastgen_operator_desired_replicas{OPERATOR})",
                },
            )
        )
        .with_panel(
            word(
                "Last scaling decision",
                "Why the autoscaler last decided as it did. kubectl describe fgd says it in a sentence.",
                {"{{reason}}": f"max by (reason) (fastgen_operator_scaling_reason{OPERATOR})"},
            )
        )
        .with_panel(
            number(
                "Backlog",
                "Prompt tokens that wait to be computed, on all replicas.",
                "short",
                {"tokens": f"sum(fastgen_backlog_prompt_tokens{ENGINES})"},
            )
        )
        .with_panel(
            number(
                "First token, 95 of 100",
                "Within this time came 95 of 100 first tokens.",
                "s",
                {"seconds": quantiles("fastgen_time_to_first_token_seconds")["95 of 100"]},
            )
        )
        .with_panel(
            number(
                "Tokens per second",
                "Prompt and generated tokens that passes computed, on all replicas.",
                "short",
                {"tokens/s": f"sum({rate('fastgen_scheduled_tokens_total')})"},
            )
        )
    )


def _budget(dashboard: Dashboard) -> Dashboard:
    passes = f"sum({rate('fastgen_step_seconds_count')} * fastgen_token_budget{ENGINES})"
    filled = f"sum by (phase) ({rate('fastgen_scheduled_tokens_total')}) / ignoring(phase) group_left {passes}"
    return (
        dashboard.with_row(Row("Token budget"))
        .with_panel(
            stacked(
                "Budget fill by phase",
                "What part of their token budget passes were filled with. Full passes and a growing backlog: the "
                "replicas are at their limit.",
                "percentunit",
                {"{{phase}}": filled},
            ).max(1)
        )
        .with_panel(
            lines(
                "Backlog",
                "Prompt tokens not yet computed, of requests that wait and of prompts that are half done.",
                "short",
                {"{{pod}}": f"sum by (pod) (fastgen_backlog_prompt_tokens{ENGINES})"},
            )
        )
        .with_panel(
            lines(
                "KV cache in use",
                "Share of the KV cache's blocks, by pod. Near 1, sequences are preempted.",
                "percentunit",
                {"{{pod}}": f"max by (pod) (fastgen_kv_cache_usage_ratio{ENGINES})"},
            ).max(1)
        )
        .with_panel(
            lines(
                "Requests in the engines",
                "Running, waiting for a place, and swapped out to host memory.",
                "short",
                {state: f"sum(fastgen_num_requests_{state}{ENGINES})" for state in ("running", "waiting", "swapped")},
            )
        )
    )


def _latency(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Latency and outcome"))
        .with_panel(
            lines(
                "Time to first token",
                "From a request's arrival to its first token.",
                "s",
                quantiles("fastgen_time_to_first_token_seconds"),
            )
        )
        .with_panel(
            lines(
                "Inter-token latency",
                "Every gap between two tokens of a request.",
                "s",
                quantiles("fastgen_inter_token_latency_seconds"),
            )
        )
        .with_panel(
            stacked(
                "Requests that ended",
                "Requests per second, by how they ended.",
                "reqps",
                {"{{finish_reason}}": f"sum by (finish_reason) ({rate('fastgen_request_success_total')})"},
            )
        )
        .with_panel(
            stacked(
                "Refused and preempted",
                "Requests per second that were refused, and sequences that lost their KV blocks for a while.",
                "short",
                {
                    "refused: {{reason}}": f"sum by (reason) ({rate('fastgen_request_rejected_total')})",
                    "preempted: {{mode}}": f"sum by (mode) ({rate('fastgen_preemptions_total')})",
                },
            )
        )
    )


def _scaling(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Scaling"))
        .with_panel(
            lines(
                "Desired against ready replicas",
                "What is wanted, what of it answers, and how many replicas the demand would keep wholly busy.",
                "short",
                {
                    "desired": f"max(fastgen_operator_desired_replicas{OPERATOR})",
                    "ready": f"max(fastgen_operator_ready_replicas{OPERATOR})",
                    "busy": f"max(fastgen_operator_scaling_load_replicas{OPERATOR})",
                },
            )
        )
        .with_panel(
            timeline(
                "Reason of the last decision",
                "Which reason the autoscaler's last decision had, and when.",
                {"{{reason}}": f"max by (reason) (fastgen_operator_scaling_reason{OPERATOR})"},
            )
        )
        .with_panel(
            stacked(
                "Decisions by reason",
                "Decisions that were another or had another reason than the one before. Many of them: it flaps.",
                "short",
                {
                    "{{reason}}": "sum by (reason) "
                    f"(increase(fastgen_operator_scaling_decisions_total{OPERATOR}[$__rate_interval]))"
                },
            )
        )
        .with_panel(
            lines(
                "Age of what scaling is decided on",
                "Seconds since the operator last read the engines. Where it grows, the autoscaler holds.",
                "s",
                {"age": f"min(fastgen_operator_scrape_age_seconds{OPERATOR})"},
            )
        )
    )


def _choice(name: str, label: str, query: str) -> QueryVariable:
    variable = QueryVariable(name).label(label).datasource(DATASOURCE).query(query)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
