"""The dashboard of the gateway."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.base import choices, new_dashboard
from dashboards.panels import lines, number, quantiles, rate, stacked

_PODS: Final = '{pod=~"$pod"}'
_ROUTED: Final = '{outcome="routed",pod=~"$pod"}'
_REFUSED: Final = '{outcome!="routed",pod=~"$pod"}'
_MODEL: Final = "{{namespace}}/{{name}}"


def build_gateway() -> Dashboard:
    """Build the dashboard, with variables for data source and gateway pods."""
    dashboard = new_dashboard("Gateway", "Requests, holds and clients of the gateway.").with_variable(
        choices("pod", "Gateway pod", "label_values(fastgen_gateway_requests_total, pod)")
    )
    return _reads(_clients(_models(_overview(dashboard))))


def _rate(metric: str, selector: str = _PODS) -> str:
    return rate(f"fastgen_gateway_{metric}", selector)


def _gauge(metric: str) -> str:
    return f"fastgen_gateway_{metric}{_PODS}"


def _overview(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Overview"))
        .with_panel(
            number(
                "Requests",
                "Requests per second that are sent to a replica.",
                "reqps",
                {"requests/s": f"sum({_rate('requests_total', _ROUTED)})"},
            )
        )
        .with_panel(
            number(
                "Refused requests",
                "Share of the requests that the gateway answers with an error.",
                "percentunit",
                {
                    "refused": f"sum({_rate('requests_total', _REFUSED)}) / (sum({_rate('requests_total')}) > 0)",
                },
            )
        )
        .with_panel(
            number(
                "Running requests",
                "Requests sent to a replica that have not ended.",
                "none",
                {"running": f"sum({_gauge('requests_running')})"},
            )
        )
        .with_panel(
            number(
                "Held requests",
                "Requests that wait for a ready replica.",
                "none",
                {"held": f"sum({_gauge('held_requests')})"},
            )
        )
        .with_panel(
            number(
                "Hold time, p95",
                "95th percentile of the time for which released requests were held.",
                "s",
                {"seconds": quantiles("fastgen_gateway_hold_seconds", _PODS)["p95"]},
            )
        )
        .with_panel(
            number(
                "Retries",
                "Requests per second that another replica than the chosen one answers.",
                "reqps",
                {"retries/s": f"sum({_rate('retries_total')})"},
            )
        )
    )


def _models(dashboard: Dashboard) -> Dashboard:
    by = "namespace, name"
    return (
        dashboard.with_row(Row("Models"))
        .with_panel(
            stacked(
                "Requests by model",
                "Requests per second that are sent to replicas of each FastGenDeployment.",
                "reqps",
                {_MODEL: f"sum by ({by}) ({_rate('requests_total', _ROUTED)})"},
            )
        )
        .with_panel(
            stacked(
                "Running requests by model",
                "Requests sent to a replica that have not ended.",
                "none",
                {_MODEL: f"sum by ({by}) ({_gauge('requests_running')})"},
            )
        )
        .with_panel(
            stacked(
                "Held requests by model",
                "Requests that wait for a ready replica.",
                "none",
                {_MODEL: f"sum by ({by}) ({_gauge('held_requests')})"},
            )
        )
        .with_panel(
            lines(
                "Hold time",
                "Time for which released requests were held.",
                "s",
                quantiles("fastgen_gateway_hold_seconds", _PODS),
            )
        )
        .with_panel(
            lines(
                "Ready replicas",
                "Replicas that get requests, as the gateway pod that knows the fewest sees them.",
                "none",
                {_MODEL: f"min by ({by}) ({_gauge('ready_replicas')})"},
            )
        )
        .with_panel(
            stacked(
                "Retries by model",
                "Requests per second that another replica than the chosen one answers: that one refused or reset the "
                "connection, or drains.",
                "reqps",
                {_MODEL: f"sum by ({by}) ({_rate('retries_total')})"},
            )
        )
        .with_panel(
            stacked(
                "Refusals by reason",
                "Requests per second that the gateway answers with an error, by its code.",
                "reqps",
                {"{{outcome}}": f"sum by (outcome) ({_rate('requests_total', _REFUSED)})"},
            ).span(24)
        )
    )


def _clients(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Clients, with API keys"))
        .with_panel(
            stacked(
                "Requests by client",
                "Requests per second that are sent to a replica.",
                "reqps",
                {"{{client}}": f"sum by (client) ({_rate('client_requests_total', _ROUTED)})"},
            )
        )
        .with_panel(
            stacked(
                "Refusals by client",
                "Requests per second that are answered with an error, by its code: limits of the client, for example.",
                "reqps",
                {"{{client}}: {{outcome}}": f"sum by (client, outcome) ({_rate('client_requests_total', _REFUSED)})"},
            )
        )
        .with_panel(
            stacked(
                "Tokens by client",
                "Tokens per second of the prompts and outputs of requests that have ended.",
                "short",
                {"{{client}}: {{kind}}": f"sum by (client, kind) ({_rate('client_tokens_total')})"},
            )
        )
        .with_panel(
            stacked(
                "Concurrent requests by client",
                "Waiting and running requests, which count towards the limit of concurrent requests.",
                "none",
                {"{{client}}": f"sum by (client) ({_gauge('client_requests_running')})"},
            )
        )
    )


def _reads(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("What the gateway reads"))
        .with_panel(
            stacked(
                "Failed scrapes of replicas",
                "Failed scrapes per second, by reason. Without metrics, the replica with fewest requests is chosen.",
                "ops",
                {f"{_MODEL}: {{{{reason}}}}": f"sum by (namespace, name, reason) ({_rate('scrape_failures_total')})"},
            )
        )
        .with_panel(
            stacked(
                "Failed watches",
                "Failed lists and watches of the API server per second, by kind. What was read stays in use.",
                "ops",
                {"{{kind}}": f"sum by (kind) ({_rate('watch_failures_total')})"},
            )
        )
    )
