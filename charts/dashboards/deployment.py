"""The dashboard of one FastGenDeployment."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, VariableRefresh, VariableSort

from dashboards.panels import DATASOURCE, ENGINES, OPERATOR, lines, number, quantiles, rate, stacked, timeline, word


def build_dashboard() -> Dashboard:
    """Build the dashboard, with variables for data source, namespace and FastGenDeployment."""
    dashboard = (
        Dashboard("FastGen deployment")
        .uid("fastgen-deployment")
        .description("State, token budget, latency and scaling of one FastGenDeployment.")
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
    return _scaling(_latency(_budget(_overview(dashboard))))


def _overview(dashboard: Dashboard) -> Dashboard:
    ready = f'max by (status, reason) (fastgen_operator_condition{{type="Ready",{OPERATOR[1:]})'
    return (
        dashboard.with_row(Row("Overview"))
        .with_panel(word("Ready", "Status and reason of the condition Ready.", {"{{status}}: {{reason}}": ready}))
        .with_panel(
            number(
                "Replicas",
                "Ready replicas of the current pod template, and desired replicas.",
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
                "Reason of the autoscaler's last decision. kubectl describe fgd shows the message.",
                {"{{reason}}": f"max by (reason) (fastgen_operator_scaling_reason{OPERATOR})"},
            )
        )
        .with_panel(
            number(
                "Backlog",
                "Prompt tokens not yet computed, over all replicas.",
                "short",
                {"tokens": f"sum(fastgen_backlog_prompt_tokens{ENGINES})"},
            )
        )
        .with_panel(
            number(
                "Time to first token, p95",
                "95th percentile of the time from a request's arrival to its first token.",
                "s",
                {"seconds": quantiles("fastgen_time_to_first_token_seconds")["p95"]},
            )
        )
        .with_panel(
            number(
                "Tokens per second",
                "Prompt and generated tokens computed per second, over all replicas.",
                "short",
                {"tokens/s": f"sum({rate('fastgen_scheduled_tokens_total')})"},
            )
        )
    )


def _budget(dashboard: Dashboard) -> Dashboard:
    full = f"sum({rate('fastgen_step_seconds_count')} * fastgen_token_budget{ENGINES})"
    filled = f"sum by (phase) ({rate('fastgen_scheduled_tokens_total')}) / ignoring(phase) group_left {full}"
    return (
        dashboard.with_row(Row("Token budget"))
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
                {"{{pod}}": f"sum by (pod) (fastgen_backlog_prompt_tokens{ENGINES})"},
            )
        )
        .with_panel(
            lines(
                "KV cache utilization",
                "Share of the KV cache's blocks in use, by pod. Near 100 %, sequences are preempted.",
                "percentunit",
                {"{{pod}}": f"max by (pod) (fastgen_kv_cache_usage_ratio{ENGINES})"},
            ).max(1)
        )
        .with_panel(
            lines(
                "Requests",
                "Running, queued, and swapped out to host memory, over all replicas.",
                "short",
                {state: f"sum(fastgen_num_requests_{state}{ENGINES})" for state in ("running", "waiting", "swapped")},
            )
        )
    )


def _latency(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Latency and requests"))
        .with_panel(
            lines(
                "Time to first token",
                "Time from a request's arrival to its first token, over all replicas.",
                "s",
                quantiles("fastgen_time_to_first_token_seconds"),
            )
        )
        .with_panel(
            lines(
                "Inter-token latency",
                "Time between consecutive tokens of a response, over all replicas.",
                "s",
                quantiles("fastgen_inter_token_latency_seconds"),
            )
        )
        .with_panel(
            stacked(
                "Finished requests",
                "Finished requests per second by finish reason.",
                "reqps",
                {"{{finish_reason}}": f"sum by (finish_reason) ({rate('fastgen_request_success_total')})"},
            )
        )
        .with_panel(
            stacked(
                "Rejections and preemptions",
                "Rejected requests per second by reason, and preempted sequences per second by mode.",
                "short",
                {
                    "rejected: {{reason}}": f"sum by (reason) ({rate('fastgen_request_rejected_total')})",
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
                "Desired and ready replicas",
                "Desired replicas, those that the autoscaler decided on (they differ in a dry run), ready replicas, "
                "and the demand in fully utilized replicas.",
                "short",
                {
                    "desired": f"max(fastgen_operator_desired_replicas{OPERATOR})",
                    "recommended": f"max(fastgen_operator_recommended_replicas{OPERATOR})",
                    "ready": f"max(fastgen_operator_ready_replicas{OPERATOR})",
                    "demand": f"max(fastgen_operator_scaling_load_replicas{OPERATOR})",
                },
            )
        )
        .with_panel(
            timeline(
                "Reason of the last decision",
                "Reason of the autoscaler's last decision over time.",
                {"{{reason}}": f"max by (reason) (fastgen_operator_scaling_reason{OPERATOR})"},
            )
        )
        .with_panel(
            stacked(
                "Decisions by reason",
                "Decisions that changed the replicas or the reason. Frequent changes mean that the autoscaler flaps.",
                "short",
                {
                    "{{reason}}": "sum by (reason) "
                    f"(increase(fastgen_operator_scaling_decisions_total{OPERATOR}[$__rate_interval]))"
                },
            )
        )
        .with_panel(
            lines(
                "Age of engine metrics",
                "Seconds since the operator last scraped the engines. If it grows, the autoscaler holds the replicas.",
                "s",
                {"age": f"min(fastgen_operator_scrape_age_seconds{OPERATOR})"},
            )
        )
    )


def _choice(name: str, label: str, query: str) -> QueryVariable:
    variable = QueryVariable(name).label(label).datasource(DATASOURCE).query(query)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
