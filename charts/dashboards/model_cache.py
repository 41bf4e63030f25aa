"""The dashboard of the downloads of models."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.base import choices, new_dashboard, with_events
from dashboards.panels import lines, number, stacked, timeline

_CHOSEN: Final = '{namespace=~"$namespace"}'
_RESOURCE: Final = "{{namespace}}/{{name}}"
_BY: Final = "max by (namespace, name, reason)"
# Reasons of several conditions, all about a volume.
_VOLUME: Final = "VolumeOnOneNode|VolumeNotBound|VolumeFull|FailedMount|FailedAttachVolume"


def build_model_cache() -> Dashboard:
    """Build the dashboard, with variables for data source and namespaces."""
    dashboard = new_dashboard(
        "Model cache", "Downloads of models to volumes and pods, and problems with volumes."
    ).with_variable(choices("namespace", "Namespace", "label_values(fastgen_operator_desired_replicas, namespace)"))
    return _downloads(_overview(with_events(dashboard, _CHOSEN, f"{_RESOURCE}: ")))


def _condition(matchers: str) -> str:
    return f"fastgen_operator_condition{{{matchers},{_CHOSEN[1:]}"


def _overview(dashboard: Dashboard) -> Dashboard:
    def count(matchers: str) -> str:
        # Nothing, instead of 0, without metrics of an operator.
        known = f"count(fastgen_operator_condition{_CHOSEN})"
        return f"count(max by (namespace, name) ({_condition(matchers)})) or 0 * {known}"

    panels = (
        ("Cached", "FastGenDeployments whose model is in the volume, or in the pods.", 'reason="Cached"'),
        (
            "Not needed",
            "FastGenDeployments that download nothing: the model is in the engine container or in your own claim, or "
            "there are 0 replicas.",
            'reason="NotNeeded"',
        ),
        ("Downloading", "FastGenDeployments whose model is being downloaded.", 'status="Unknown"'),
        ("Failed", "FastGenDeployments whose download has failed. It is retried.", 'status="False"'),
    )
    dashboard = dashboard.with_row(Row("Overview"))
    for title, description, matchers in panels:
        dashboard = dashboard.with_panel(
            number(title, description, "none", {"deployments": count(f'type="ModelCached",{matchers}')})
        )
    waiting = 'type="Progressing",reason="WaitingForModel"'
    volumes = f'type!="Ready",status="False",reason=~"{_VOLUME}"'
    return dashboard.with_panel(
        number(
            "Waiting for a model",
            "FastGenDeployments that have no pods yet because their first download is running.",
            "none",
            {"deployments": count(waiting)},
        )
    ).with_panel(
        number(
            "Problems with volumes",
            "FastGenDeployments with a volume that is full, not bound, not attached or not mounted, or whose node has "
            "no room.",
            "none",
            {"deployments": count(volumes)},
        )
    )


def _downloads(dashboard: Dashboard) -> Dashboard:
    cached = _condition('type="ModelCached"')
    missing = _condition('type="ModelCached",status!="True"')
    blocked = _condition(f'type!="Ready",status!="True",reason=~"WaitingForModel|{_VOLUME}"')
    return (
        dashboard.with_row(Row("Downloads"))
        .with_panel(
            timeline(
                "Condition ModelCached",
                "Reason of the condition ModelCached over time. A failed download alternates between its error and "
                "Downloading.",
                {f"{_RESOURCE}: {{{{reason}}}}": f"{_BY} ({cached})"},
            ).span(24)
        )
        .with_panel(
            stacked(
                "Deployments by reason",
                "Number of FastGenDeployments by the reason of ModelCached.",
                "short",
                {"{{reason}}": f"count by (reason) ({_BY} ({cached}))"},
            )
        )
        .with_panel(
            lines(
                "Time without a model, last 6 hours",
                "Time within the last 6 hours in which the model was not complete: the duration of downloads, with "
                "failed attempts.",
                "s",
                {_RESOURCE: f"count_over_time(max by (namespace, name) ({missing})[6h:10s]) * 10"},
            )
        )
        .with_panel(
            stacked(
                "Writes of Jobs and claims",
                "The operator's writes of download Jobs and PersistentVolumeClaims per second.",
                "wps",
                {
                    "{{kind}}": "sum by (kind) (rate(fastgen_operator_writes_total"
                    '{kind=~"Job|PersistentVolumeClaim"}[$__rate_interval]))'
                },
            )
        )
        .with_panel(
            stacked(
                "Blocked deployments",
                "Number of FastGenDeployments whose pods wait for the model, or for a volume, by reason.",
                "short",
                {"{{reason}}": f"count by (reason) ({_BY} ({blocked}))"},
            )
        )
    )
