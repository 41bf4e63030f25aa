"""The queries in a rendered dashboard, with values for its variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# A dashboard, as parsed from its JSON.
Rendered = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel or an annotation.

    Attributes:
        title: of its panel or annotation.
        expression: PromQL with Grafana's variables.
        legend: template with labels of the series.
    """

    title: str
    expression: str
    legend: str

    def name(self, labels: Mapping[str, str]) -> str:
        """Return the legend of a series."""
        return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), self.legend)


def panel_queries(panel: dict[str, Any]) -> list[Query]:
    """Return the queries of a panel."""
    targets = panel.get("targets", ())
    return [Query(panel["title"], target["expr"], target["legendFormat"]) for target in targets]


def event_queries(dashboard: Rendered) -> list[Query]:
    """Return the queries of a dashboard's annotations."""
    annotations = dashboard["annotations"].get("list", ())
    return [Query(each["name"], each["expr"], each["titleFormat"]) for each in annotations]


def variable_queries(dashboard: Rendered) -> Iterator[tuple[str, str]]:
    """Yield the selector and the label of each variable that lists the values of a label."""
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert match is not None, variable["query"]
            yield match[1], match[2]


def fill(expression: str, variables: Mapping[str, str]) -> str:
    """Return the expression with the values of the variables. Raises KeyError for an unknown one.

    Args:
        variables: values by name, without `$`.
    """
    return re.sub(r"\$(\w+)", lambda match: variables[match[1]], expression)
