"""Panel types and queries that the dashboards are built from."""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_uppercase
from typing import Final

from grafana_foundation_sdk.builders import common, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders.dashboard import FieldColor
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    StackingMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, FieldColorModeId

DATASOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
STATE_COLOUR: Final = "blue"
QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

# PromQL expressions by legend.
Queries = Mapping[str, str]


def rate(metric: str, selector: str) -> str:
    """Return the per-second rate of a counter, one series per process; `selector` is in braces."""
    return f"rate({metric}{selector}[$__rate_interval])"


def quantiles(histogram: str, selector: str) -> Queries:
    """Return quantiles of a histogram over all series of the selector."""
    buckets = f"sum by (le) ({rate(f'{histogram}_bucket', selector)})"
    return {name: f"histogram_quantile({share}, {buckets})" for name, share in QUANTILES.items()}


def quantile_by(labels: str, histogram: str, selector: str, share: float = 0.95) -> str:
    """Return one quantile of a histogram for each value of the labels."""
    return f"histogram_quantile({share}, sum by ({labels}, le) ({rate(f'{histogram}_bucket', selector)}))"


def mean(histogram: str, selector: str) -> str:
    """Return the mean of a histogram over all series of the selector."""
    return f"sum({rate(f'{histogram}_sum', selector)}) / sum({rate(f'{histogram}_count', selector)})"


def lines(title: str, description: str, unit: str, queries: Queries) -> timeseries.Panel:
    """Return a time series panel with lines, from 0."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True)
    panel = timeseries.Panel().title(title).description(description).unit(unit).min(0).datasource(DATASOURCE)
    panel = panel.legend(legend).fill_opacity(10).height(8).span(12)
    for query in _queries(queries):
        panel = panel.with_target(query)
    return panel


def stacked(title: str, description: str, unit: str, queries: Queries) -> timeseries.Panel:
    """Return a time series panel with stacked lines."""
    panel = lines(title, description, unit, queries).fill_opacity(40)
    return panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))


def number(title: str, description: str, unit: str, queries: Queries) -> stat.Panel:
    """Return a stat panel with current values."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE).height(4).span(4)
    panel = panel.graph_mode(BigValueGraphMode.NONE).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    for query in _queries(queries):
        panel = panel.with_target(query.instant())
    return panel


def word(title: str, description: str, queries: Queries) -> stat.Panel:
    """Return a stat panel with the legends of the current series."""
    return number(title, description, "none", queries).text_mode(BigValueTextMode.NAME).no_value("none")


def timeline(title: str, description: str, queries: Queries) -> statetimeline.Panel:
    """Return a state timeline panel: a row for each series, filled while it exists."""
    panel = statetimeline.Panel().title(title).description(description).datasource(DATASOURCE).height(8).span(12)
    # One colour for all rows: several would suggest good and bad states.
    panel = panel.show_value(VisibilityMode.NEVER).color_scheme(
        FieldColor().mode(FieldColorModeId.FIXED).fixed_color(STATE_COLOUR)
    )
    for query in _queries(queries):
        panel = panel.with_target(query)
    return panel


def _queries(queries: Queries) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().ref_id(letter).expr(expression).legend_format(name)
        for letter, (name, expression) in zip(ascii_uppercase, queries.items(), strict=False)
    ]
