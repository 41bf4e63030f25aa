"""The dashboard of all FastGenDeployments."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.base import choices, new_dashboard, with_events
from dashboards.panels import lines, number, quantile_by, rate, stacked, timeline

# All series of the chosen namespaces: the engines' and the operator's have the same label.
_CHOSEN: Final = '{namespace=~"$namespace"}'
# Labels of the owner in engines' series, and the legend for them.
_OWNER: Final = "namespace, fastgen_dev_deployment"
_ENGINES: Final = "{{namespace}}/{{fastgen_dev_deployment}}"
_RESOURCE: Final = "{{namespace}}/{{name}}"


def build_fleet() -> Dashboard:
    """Build the dashboard, with variables for data source and namespaces."""
    dashboard = new_dashboard("Fleet", "State, load, latency and replicas of all FastGenDeployments.").with_variable(
        choices("namespace", "Namespace", "label_values(fastgen_operator_desired_replicas, namespace)")
    )
    return _replicas(_latency(_load(_state(with_events(dashboard, _CHOSEN, f"{_RESOURCE}: ")))))


def _state(dashboard: Dashboard) -> Dashboard:
    desired = f"max by (namespace, name) (fastgen_operator_desired_replicas{_CHOSEN})"
    ready = f"max by (namespace, name) (fastgen_operator_ready_replicas{_CHOSEN})"
    failing = f'fastgen_operator_condition{{type="Ready",status!="True",{_CHOSEN[1:]}'
    states = f'fastgen_operator_condition{{type="Ready",{_CHOSEN[1:]}'
    return (
        dashboard.with_row(Row("State"))
        .with_panel(
            number("Deployments", "Number of FastGenDeployments.", "none", {"deployments": f"count({desired})"})
        )
        .with_panel(
            number(
                "Not Ready",
                "FastGenDeployments whose condition Ready is not True.",
                "none",
                # Nothing, instead of 0, without metrics of an operator.
                {"deployments": f"count(max by (namespace, name) ({failing})) or 0 * count({states})"},
            )
        )
        .with_panel(
            number(
                "Replicas",
                "Ready replicas of the current pod templates, and desired replicas.",
                "none",
                {"ready": f"sum({ready})", "desired": f"sum({desired})"},
            )
        )
        .with_panel(
            number(
                "Tokens per second",
                "Prompt and generated tokens computed per second.",
                "short",
                {"tokens/s": f"sum({rate('fastgen_scheduled_tokens_total', _CHOSEN)})"},
            )
        )
        .with_panel(
            number(
                "Requests per second",
                "Finished requests per second.",
                "reqps",
                {"requests/s": f"sum({rate('fastgen_request_success_total', _CHOSEN)})"},
            )
        )
        .with_panel(
            number(
                "Backlog",
                "Prompt tokens not yet computed.",
                "short",
                {"tokens": f"sum(fastgen_backlog_prompt_tokens{_CHOSEN})"},
            )
        )
        .with_panel(
            timeline(
                "Condition Ready",
                "Reason of the condition Ready over time.",
                {f"{_RESOURCE}: {{{{reason}}}}": f"max by (namespace, name, reason) ({states})"},
            ).span(24)
        )
    )


def _load(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Load"))
        .with_panel(
            stacked(
                "Tokens per second",
                "Prompt and generated tokens computed per second.",
                "short",
                {_ENGINES: f"sum by ({_OWNER}) ({rate('fastgen_scheduled_tokens_total', _CHOSEN)})"},
            )
        )
        .with_panel(
            lines(
                "Backlog",
                "Prompt tokens not yet computed, of queued and partially prefilled requests.",
                "short",
                {_ENGINES: f"sum by ({_OWNER}) (fastgen_backlog_prompt_tokens{_CHOSEN})"},
            )
        )
        .with_panel(
            lines(
                "Requests in progress",
                "Running and queued requests.",
                "short",
                {
                    f"{_ENGINES} {state}": f"sum by ({_OWNER}) (fastgen_num_requests_{state}{_CHOSEN})"
                    for state in ("running", "waiting")
                },
            )
        )
        .with_panel(
            lines(
                "KV cache utilization",
                "Share of the KV cache's blocks in use, of the fullest replica.",
                "percentunit",
                {_ENGINES: f"max by ({_OWNER}) (fastgen_kv_cache_usage_ratio{_CHOSEN})"},
            ).max(1)
        )
    )


def _latency(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Latency"))
        .with_panel(
            lines(
                "Time to first token, p95",
                "95th percentile of the time from a request's arrival to its first token.",
                "s",
                {_ENGINES: quantile_by(_OWNER, "fastgen_time_to_first_token_seconds", _CHOSEN)},
            )
        )
        .with_panel(
            lines(
                "Inter-token latency, p95",
                "95th percentile of the time between consecutive tokens of a response.",
                "s",
                {_ENGINES: quantile_by(_OWNER, "fastgen_inter_token_latency_seconds", _CHOSEN)},
            )
        )
    )


def _replicas(dashboard: Dashboard) -> Dashboard:
    info = 'fastgen_engine_info{namespace=~"$namespace"}'
    return (
        dashboard.with_row(Row("Replicas"))
        .with_panel(
            stacked(
                "Desired replicas",
                "Desired replicas. Multiplied by the GPUs of a replica, they are the cost.",
                "short",
                {_RESOURCE: f"max by (namespace, name) (fastgen_operator_desired_replicas{_CHOSEN})"},
            )
        )
        .with_panel(
            stacked(
                "Ready replicas",
                "Ready replicas of the current pod templates.",
                "short",
                {_RESOURCE: f"max by (namespace, name) (fastgen_operator_ready_replicas{_CHOSEN})"},
            )
        )
        .with_panel(
            stacked(
                "Engines by version",
                "Number of engines by version, device and dtype.",
                "short",
                {"{{version}} {{device}} {{dtype}}": f"count by (version, device, dtype) ({info})"},
            )
        )
        .with_panel(
            stacked(
                "Conditions that are False",
                "Number of FastGenDeployments by condition and reason, without Ready and the autoscaler's conditions.",
                "short",
                {
                    "{{type}}: {{reason}}": "count by (type, reason) (max by (namespace, name, type, reason) "
                    f'(fastgen_operator_condition{{type!~"Ready|Scaling.*",status="False",{_CHOSEN[1:]}))'
                },
            )
        )
    )
