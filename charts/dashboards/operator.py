"""The dashboard of the operator."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.base import choices, new_dashboard
from dashboards.panels import lines, number, quantiles, rate, stacked, timeline

_PODS: Final = '{pod=~"$pod"}'


def build_operator() -> Dashboard:
    """Build the dashboard, with variables for data source and operator pods."""
    dashboard = new_dashboard("Operator", "Leader, reconciles and API requests of the operator.").with_variable(
        choices("pod", "Operator pod", "label_values(fastgen_operator_leader, pod)")
    )
    return _requests(_reconciles(_overview(dashboard)))


def _rate(metric: str) -> str:
    return rate(f"fastgen_operator_{metric}", _PODS)


def _overview(dashboard: Dashboard) -> Dashboard:
    reconciles = f"sum({_rate('reconcile_seconds_count')})"
    return (
        dashboard.with_row(Row("Overview"))
        .with_panel(
            number(
                "Leaders",
                "Operator pods that are the leader: 1 for each operator.",
                "none",
                {"leaders": f"sum(fastgen_operator_leader{_PODS})"},
            )
        )
        .with_panel(
            number(
                "Resources",
                "FastGenDeployments of the operator.",
                "none",
                {"resources": f"count(fastgen_operator_desired_replicas{_PODS})"},
            )
        )
        .with_panel(number("Reconciles", "Reconciles per second.", "ops", {"reconciles/s": reconciles}))
        .with_panel(
            number(
                "Failed reconciles",
                "Share of the reconciles that failed.",
                "percentunit",
                # Nothing instead of 0 / 0 while all reconciles are skipped.
                {"failed": f"sum({_rate('reconcile_errors_total')}) / ({reconciles} > 0)"},
            )
        )
        .with_panel(
            number(
                "Duration of reconciles, p95",
                "95th percentile of the duration of a reconcile.",
                "s",
                {"seconds": quantiles("fastgen_operator_reconcile_seconds", _PODS)["p95"]},
            )
        )
        .with_panel(
            number(
                "API requests",
                "Requests to the API server per second, except watches.",
                "reqps",
                {"requests/s": f"sum({_rate('api_requests_total')})"},
            )
        )
    )


def _reconciles(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Reconciles"))
        .with_panel(
            timeline(
                "Leader",
                "Which operator pod is the leader.",
                {"{{pod}}": f"max by (pod) (fastgen_operator_leader{_PODS}) == 1"},
            )
        )
        .with_panel(
            lines(
                "Reconciles",
                "Reconciles per second, how many of them failed, and those skipped by resyncs because nothing had "
                "changed.",
                "ops",
                {
                    "reconciles": f"sum({_rate('reconcile_seconds_count')})",
                    "failed": f"sum({_rate('reconcile_errors_total')})",
                    "skipped": f"sum({_rate('skipped_reconciles_total')})",
                },
            )
        )
        .with_panel(
            lines(
                "Duration of reconciles",
                "Duration of a reconcile, including its requests to the API server.",
                "s",
                quantiles("fastgen_operator_reconcile_seconds", _PODS),
            )
        )
        .with_panel(
            lines(
                "Stalls",
                "Longest time without a step of a running reconcile, of any worker while resources wait, or of the "
                "event loop. The liveness probe fails after 90 s.",
                "s",
                {"{{pod}}": f"max by (pod) (fastgen_operator_stalled_seconds{_PODS})"},
            )
        )
        .with_panel(
            stacked(
                "Conditions that are not True",
                "Number of FastGenDeployments by condition and reason, without Ready and the autoscaler's conditions.",
                "short",
                {
                    "{{type}}: {{reason}}": "count by (type, reason) "
                    f'(fastgen_operator_condition{{type!~"Ready|Scaling.*",status!="True",{_PODS[1:]})'
                },
            ).span(24)
        )
        .with_panel(
            stacked(
                "Kinds that cannot be read",
                "1 while a kind of objects cannot be listed or watched. What the operator knows of it is stale.",
                "short",
                {"{{kind}} {{namespace}}": f"max by (kind, namespace) (fastgen_operator_stale{_PODS}) > 0"},
            ).span(24)
        )
    )


def _requests(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Requests"))
        .with_panel(
            stacked(
                "API requests by method",
                "Requests to the API server per second, except watches.",
                "reqps",
                {"{{method}}": f"sum by (method) ({_rate('api_requests_total')})"},
            )
        )
        .with_panel(
            stacked(
                "API requests by status code",
                "Requests to the API server per second by HTTP status code; none: no response.",
                "reqps",
                {"{{code}}": f"sum by (code) ({_rate('api_requests_total')})"},
            )
        )
        .with_panel(
            stacked(
                "Writes by kind",
                "Writes to the API server per second. None in the steady state: otherwise, another writer changes the "
                "same objects.",
                "wps",
                {"{{kind}}": f"sum by (kind) ({_rate('writes_total')})"},
            )
        )
        .with_panel(
            stacked(
                "Failed scrapes of engines",
                "Failed scrapes of engine metrics per second, by reason.",
                "ops",
                {"{{reason}}": f"sum by (reason) ({_rate('scrape_failures_total')})"},
            )
        )
        .with_panel(
            stacked(
                "Failed polls of the gateway",
                "Failed polls of the gateway's pods per second, by reason. There are none "
                "without resources with minReplicas 0.",
                "ops",
                {"{{reason}}": f"sum by (reason) ({_rate('gateway_failures_total')})"},
            )
        )
    )
