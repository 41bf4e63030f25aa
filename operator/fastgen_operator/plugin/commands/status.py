"""`kubectl fastgen status`: one FastGenDeployment on one screen, or a table of all."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from fastgen_operator.kinds import Object
from fastgen_operator.plugin.cluster import Cluster, PluginError, UsageError
from fastgen_operator.plugin.commands.explain_scaling import add_operator_argument
from fastgen_operator.plugin.gateway_view import GatewayView, gateway_views, summary
from fastgen_operator.plugin.overview import Load, Overview, overview_of
from fastgen_operator.plugin.screen import Row, Screen, age_of, wrapped
from fastgen_operator.plugin.tables import coloured, condition_table, pod_table, unready_first

_WATCH_SECONDS: Final = 2.0
# Maximum lengths of the messages in the tables of conditions and pods.
_CONDITION_WIDTH: Final = 60
_POD_WIDTH: Final = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the FastGenDeployment; without it, all of a namespace")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="all FastGenDeployments of the cluster")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="output format")
    parser.add_argument("-w", "--watch", action="store_true", help="show it again every two seconds")
    add_operator_argument(parser, "namespace of the operator, where the gateway runs")


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Show the status."""
    if options.name and options.all_namespaces:
        raise UsageError("status NAME and --all-namespaces exclude each other")
    if options.watch and options.output == "json":
        raise UsageError("--watch and --output json exclude each other")
    while True:
        now = datetime.now(UTC)
        if options.name:
            resource = cluster.resource(options.name)
            found = overview_of(resource, cluster.pods(options.name), now)
            views = _gateway(cluster, options.operator_namespace, resource)
            shown: Any = found.to_json()
            if isinstance(views, list):
                shown["gateway"] = [asdict(view) for view in views]
            lines = one_screen(found, screen, now, _gateway_lines(views))
        else:
            namespace = None if options.all_namespaces else cluster.namespace
            fleet = [overview_of(resource, [], now) for resource in cluster.resources(namespace)]
            shown = [each.to_json() for each in fleet]
            where = "in any namespace" if namespace is None else f'in namespace "{namespace}"; -A shows all namespaces'
            lines = fleet_table(fleet, screen, now) if fleet else [f"no FastGenDeployment {where}"]
        if options.output == "json":
            screen.write_json(shown)
        elif options.watch:
            screen.replace(lines)
            time.sleep(_WATCH_SECONDS)
            continue
        else:
            screen.write(lines)
        return 0


def fleet_table(fleet: list[Overview], screen: Screen, now: datetime) -> list[str]:
    """Return a line for each resource, those that are not ready first."""
    rows: list[Row] = [("Namespace", "Name", "Ready", "Reason", "Pods", "Load", "Problems", "Age", "Model")]
    for each in unready_first(fleet):
        pods = f"{each.replicas['ready']}/{each.replicas['desired']}"
        load = "-" if each.load.utilization is None else f"{each.load.utilization:.0%}"
        facts = (pods, load, each.problem_reasons or "-", age_of(each.created, now), each.model)
        rows.append((each.namespace, each.name, coloured(each.ready), each.reason, *facts))
    return screen.table(rows)


def _gateway(cluster: Cluster, namespace: str, resource: Object) -> list[GatewayView] | PluginError | None:
    """Return what the gateway knows of a resource, or why that is not known; None if it is not exposed."""
    if not (resource["spec"].get("gateway") or {}).get("expose"):
        return None
    metadata = resource["metadata"]
    try:
        return gateway_views(cluster, namespace, (metadata["namespace"], metadata["name"]))
    except PluginError as error:
        return error


def _gateway_lines(views: list[GatewayView] | PluginError | None) -> list[str]:
    if isinstance(views, PluginError):
        return [f"not shown: {views}"]
    return [] if views is None else list(summary(views))


def one_screen(found: Overview, screen: Screen, now: datetime, gateway: Sequence[str] = ()) -> list[str]:
    """Return the lines about one resource; `gateway` are those about the gateway."""
    state = {"True": "ready", "False": "not ready"}.get(found.ready, "not known whether ready")
    title = screen.paint(f"{found.namespace}/{found.name}", "bold")
    lines = [f"{title}   {screen.paint(state, coloured(found.ready).colour)}: {found.reason}", ""]
    facts = [
        ("Model", found.model),
        *([("Serves", _served(found.served))] if found.served else []),
        ("URL", found.url or "-"),
        ("Age", age_of(found.created, now)),
    ]
    facts += [("Replicas", _replicas(found)), ("Supply", _supply(found)), ("Load", _load(found.load))]
    lines += [f"{name + ':':<11}{value}" for name, value in facts]
    lines += wrapped(found.autoscaling.get("message", ""), 11, "Scaling:")
    for number, line in enumerate(gateway):
        lines += wrapped(line, 11, "" if number else "Gateway:")
    conditions = screen.table(condition_table(found, now), most=_CONDITION_WIDTH)
    lines += ["", *(conditions if found.conditions else ["no conditions: no operator has handled the resource yet"])]
    pods = screen.table(pod_table(found, now), right=[2], most=_POD_WIDTH)
    lines += ["", *(pods if found.pods else ["no pods"])]
    if history := found.autoscaling.get("history"):
        lines += ["", screen.paint("Last changes by the autoscaler", "bold")]
        for step in history:
            change = f"{step['fromReplicas']} -> {step['toReplicas']}"
            lines.append(f"  {age_of(step['time'], now) + ' ago':<12}{change:<9}{step['reason']}")
            lines += wrapped(step["message"], 23)
    if found.problems:
        lines += ["", screen.paint("What to do", "bold")]
        for problem in found.problems:
            lines.append(f"  {screen.paint(problem.reason, 'yellow')} ({problem.type})")
            lines += wrapped(problem.message, 4) + wrapped(f"-> {problem.remedy}", 4)
    return lines


def _served(model: dict[str, Any]) -> str:
    """Return a line about the model, such as `llama, 135 M parameters, GGUF Q4_1, 0.1 GiB, up to 2,048 tokens`."""
    words = [model["family"]] if "family" in model else []
    if "parameters" in model:
        words.append(f"{model['parameters'] / 1e6:,.0f} M parameters")
    if "format" in model:
        words.append(model["format"])
    if "bytes" in model:
        words.append(f"{model['bytes'] / 2**30:,.1f} GiB")
    if "maxModelLength" in model:
        words.append(f"up to {model['maxModelLength']:,} tokens")
    return ", ".join(words)


def _replicas(found: Overview) -> str:
    counts = found.replicas
    words = f"{counts['ready']} ready of {counts['desired']} desired; {counts['updated']} have the current template"
    if counts["bounds"] is not None:
        words += "; the autoscaler chooses from {} to {}".format(*counts["bounds"])
    recommended = found.autoscaling.get("recommendedReplicas")
    return words if recommended is None else f"{words}; dry run: it would choose {recommended}"


def _supply(found: Overview) -> str:
    return ", ".join(f"{count} {state}" for state, count in found.supply.items() if count) or "no pods"


def _load(load: Load) -> str:
    if load.capacity is None:
        return "not measured yet"
    capacity = f"a replica computes {load.capacity:,.0f} tokens/s within the latency targets"
    if load.demand is None:
        return capacity
    words = f"{load.demand:,.0f} tokens/s arrive, {capacity}"
    share = load.utilization
    return words if share is None else f"{words}: {share:.0%} of the {load.ready} ready"
