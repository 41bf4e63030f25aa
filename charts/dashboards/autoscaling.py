"""The dashboard of the autoscaling of one FastGenDeployment."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.base import new_dashboard, one_deployment, with_events
from dashboards.panels import lines, number, rate, stacked, timeline, word

_ENGINES: Final = '{namespace="$namespace",fastgen_dev_deployment="$deployment"}'
_OPERATOR: Final = '{namespace="$namespace",name="$deployment"}'


def build_autoscaling() -> Dashboard:
    """Build the dashboard, with variables for data source, namespace and FastGenDeployment."""
    dashboard = one_deployment(
        new_dashboard("Autoscaling", "Replicas, demand and decisions of the autoscaler of one FastGenDeployment.")
    )
    return _inputs(_decisions(_replicas(with_events(dashboard, _OPERATOR))))


def _gauge(name: str) -> str:
    return f"max(fastgen_operator_{name}{_OPERATOR})"


def _reason(kind: str) -> str:
    return f'max by (status, reason) (fastgen_operator_condition{{type="{kind}",{_OPERATOR[1:]})'


def _replicas(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Replicas"))
        .with_panel(
            number(
                "Replicas",
                "Ready replicas of the current pod template, and desired replicas.",
                "none",
                {"ready": _gauge("ready_replicas"), "desired": _gauge("desired_replicas")},
            )
        )
        .with_panel(
            number(
                "Demand",
                "Smoothed demand, in fully utilized replicas.",
                "none",
                {"replicas": _gauge("scaling_load_replicas")},
            ).decimals(2)
        )
        .with_panel(
            word(
                "Last decision",
                "Reason of the autoscaler's last decision. kubectl describe fgd shows the message.",
                {"{{reason}}": f"max by (reason) (fastgen_operator_scaling_reason{_OPERATOR})"},
            )
        )
        .with_panel(
            word(
                "ScalingActive",
                "Whether the replicas follow the load. If False, the reason tells why not.",
                {"{{status}}: {{reason}}": _reason("ScalingActive")},
            )
        )
        .with_panel(
            word(
                "ScalingLimited",
                "Whether a bound, a rate limit or a full node overrides the number of replicas that the load requires.",
                {"{{status}}: {{reason}}": _reason("ScalingLimited")},
            )
        )
        .with_panel(
            number(
                "Slowest replica",
                "Speed of the slowest straggler, relative to the median; 100 % if there is no straggler.",
                "percentunit",
                {
                    "speed": f"min(fastgen_operator_straggler_speed_ratio{_OPERATOR}) "
                    f"or clamp(max(fastgen_operator_ready_replicas{_OPERATOR}), 1, 1)"
                },
            )
        )
        .with_panel(
            lines(
                "Replicas and demand",
                "Desired, recommended and ready replicas, and the demand in fully utilized replicas. Desired and "
                "recommended replicas differ only in a dry run. The learned lower bound applies with learning: Apply.",
                "short",
                {
                    "desired": _gauge("desired_replicas"),
                    "recommended": _gauge("recommended_replicas"),
                    "learned lower bound": _gauge("learned_replicas"),
                    "ready": _gauge("ready_replicas"),
                    "demand": _gauge("scaling_load_replicas"),
                },
            ).span(24)
        )
    )


def _decisions(dashboard: Dashboard) -> Dashboard:
    return (
        dashboard.with_row(Row("Decisions"))
        .with_panel(
            timeline(
                "Reason of the last decision",
                "Reason of the autoscaler's last decision over time.",
                {"{{reason}}": f"max by (reason) (fastgen_operator_scaling_reason{_OPERATOR})"},
            )
        )
        .with_panel(
            stacked(
                "Decisions by reason",
                "Decisions that changed the replicas or the reason. Frequent changes mean that the autoscaler flaps.",
                "short",
                {
                    "{{reason}}": "sum by (reason) "
                    f"(increase(fastgen_operator_scaling_decisions_total{_OPERATOR}[$__rate_interval]))"
                },
            )
        )
        .with_panel(
            timeline(
                "Holds and limits",
                "Reasons of the conditions ScalingActive and ScalingLimited over time.",
                {
                    "active: {{reason}}": _reason("ScalingActive"),
                    "limited: {{reason}}": _reason("ScalingLimited"),
                },
            )
        )
        .with_panel(
            lines(
                "Age of engine metrics",
                "Seconds since the operator last scraped the engines. If it grows, the autoscaler holds the replicas.",
                "s",
                {"age": f"min(fastgen_operator_scrape_age_seconds{_OPERATOR})"},
            )
        )
        .with_panel(
            lines(
                "Held requests",
                "Requests that the gateway holds until a replica is ready. Empty unless minReplicas is 0.",
                "none",
                {"held": _gauge("held_requests")},
            )
        )
    )


def _inputs(dashboard: Dashboard) -> Dashboard:
    def total(metric: str) -> str:
        return f"sum({rate(metric, _ENGINES)})"

    backlog = f"sum(fastgen_backlog_prompt_tokens{_ENGINES})"
    return (
        dashboard.with_row(Row("Inputs"))
        .with_panel(
            lines(
                "Arriving and computed tokens",
                "Prompt tokens that arrive per second, and tokens computed per second.",
                "short",
                {
                    "arriving prompts": total("fastgen_arrived_prompt_tokens_total"),
                    "computed": total("fastgen_scheduled_tokens_total"),
                },
            )
        )
        .with_panel(
            lines(
                "Time to compute the backlog",
                "Prompt tokens not yet computed, divided by the tokens computed per second. Replicas are added if the "
                "backlog would last longer than a new replica takes to start.",
                "s",
                {"seconds": f"{backlog} / {total('fastgen_scheduled_tokens_total')}"},
            )
        )
        .with_panel(
            lines(
                "KV cache utilization",
                "Share of the KV cache's blocks in use, by pod.",
                "percentunit",
                {"{{pod}}": f"max by (pod) (fastgen_kv_cache_usage_ratio{_ENGINES})"},
            ).max(1)
        )
        .with_panel(
            lines(
                "Utilization",
                "Demand in fully utilized replicas, divided by the ready replicas.",
                "percentunit",
                {"utilization": f"{_gauge('scaling_load_replicas')} / {_gauge('ready_replicas')}"},
            )
        )
    )
