"""What the dashboards share: their settings, variables, annotations and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink, DatasourceVariable, QueryVariable
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableRefresh,
    VariableSort,
)

from dashboards.panels import DATASOURCE

_TAG: Final = "fastgen"


def new_dashboard(title: str, description: str) -> Dashboard:
    """Return an empty dashboard `FastGen / TITLE` with a variable for the data source, and links to the others."""
    links = DashboardLink("FastGen").type(DashboardLinkType.DASHBOARDS).tags([_TAG])
    return (
        Dashboard(f"FastGen / {title}")
        .uid(f"fastgen-{title.lower().replace(' ', '-')}")
        .description(description)
        .tags([_TAG, "llm", "inference"])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(links.as_dropdown(True).include_vars(True).keep_time(True))
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )


def choice(name: str, label: str, query: str) -> QueryVariable:
    """Return a variable with one value of a `label_values` query."""
    variable = QueryVariable(name).label(label).datasource(DATASOURCE).query(query)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)


def choices(name: str, label: str, query: str) -> QueryVariable:
    """Return a variable with any number of values; initially all."""
    variable = choice(name, label, query).multi(True).include_all(True).all_value(".*")
    return variable.current(model.VariableOption(selected=True, text="All", value="$__all"))


def one_deployment(dashboard: Dashboard) -> Dashboard:
    """Add the variables of a dashboard of one FastGenDeployment."""
    source = "fastgen_operator_desired_replicas"
    return dashboard.with_variable(
        choice("namespace", "Namespace", f"label_values({source}, namespace)")
    ).with_variable(choice("deployment", "Deployment", f'label_values({source}{{namespace="$namespace"}}, name)'))


def with_events(dashboard: Dashboard, selector: str, owner: str = "") -> Dashboard:
    """Add annotations for scaling decisions and rollouts.

    Args:
        selector: of the operator's series, in braces.
        owner: template for the FastGenDeployment, in front of the annotations' titles.
    """
    # The reason of the last decision, at the minutes in which the number of replicas changed.
    by = "namespace, name"
    scaled = (
        f"max by ({by}, reason) (fastgen_operator_scaling_reason{selector}) "
        f"and on ({by}) (max by ({by}) (changes(fastgen_operator_desired_replicas{selector}[1m])) > 0)"
    )
    # The minutes in which a rollout begins: some rollouts last for days, because there is no node.
    condition = f'fastgen_operator_condition{{type="Progressing",status="True",reason="RollingOut",{selector[1:]}'
    rolling = (
        f"max by ({by}) (max_over_time({condition}[1m])) "
        f"unless on ({by}) max by ({by}) (max_over_time({condition}[1m] offset 1m))"
    )
    return dashboard.annotation(_Events("Scaling decisions", "blue", scaled, f"{owner}{{{{reason}}}}")).annotation(
        _Events("Rollouts", "orange", rolling, f"{owner}Rollout")
    )


class _AnnotationQuery(model.AnnotationQuery):
    """An annotation query of Prometheus, with the fields that the SDK's model lacks."""

    title_format: str = ""

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "titleFormat": self.title_format, "step": "60s"}


@dataclass
class _Events(Builder[model.AnnotationQuery]):
    """Builds an annotation query: an event at each sample of the expression.

    Attributes:
        title: template of the events' titles, with labels of the series.
    """

    name: str
    colour: str
    expression: str
    title: str

    def build(self) -> model.AnnotationQuery:
        query = _AnnotationQuery(name=self.name, datasource=DATASOURCE, icon_color=self.colour, expr=self.expression)
        query.title_format = self.title
        return query
