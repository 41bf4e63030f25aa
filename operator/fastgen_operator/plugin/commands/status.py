"""`kubectl fastgen status`: one FastGenDeployment on one screen, or a table of all."""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from typing import Any, Final

from fastgen_operator.plugin.cluster import Cluster, UsageError
from fastgen_operator.plugin.overview import Load, Overview, overview_of
from fastgen_operator.plugin.screen import Cell, Row, Screen, age_of, wrapped

_WATCH_SECONDS: Final = 2.0
_WIDTH: Final = 120
_COLOURS: Final = {
    "True": "green", "False": "red", "Unknown": "yellow",
    "Ready": "green", "Starting": "cyan", "Draining": "cyan", "Straggler": "yellow", "Unschedulable": "yellow",
    "Failing": "red", "Lost": "red", "Ended": "dim",
}  # fmt: skip
# Of these conditions, True is not good news.
_LIMITS: Final = ("ScalingLimited",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the FastGenDeployment; without it, all of a namespace")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="all FastGenDeployments of the cluster")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="output format")
    parser.add_argument("-w", "--watch", action="store_true", help="show it again every two seconds")


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Show the status."""
    if options.name and options.all_namespaces:
        raise UsageError("status NAME and --all-namespaces exclude each other")
    if options.watch and options.output == "json":
        raise UsageError("--watch and --output json exclude each other")
    while True:
        now = datetime.now(UTC)
        if options.name:
            found = overview_of(cluster.resource(options.name), cluster.pods(options.name), now)
            shown: Any = found.to_json()
            lines = one_screen(found, screen, now)
        else:
            namespace = None if options.all_namespaces else cluster.namespace
            fleet = [overview_of(resource, [], now) for resource in cluster.resources(namespace)]
            shown = [each.to_json() for each in fleet]
            where = "in any namespace" if namespace is None else f'in namespace "{namespace}"; -A shows all namespaces'
            lines = fleet_table(fleet, screen, now) if fleet else [f"no FastGenDeployment {where}"]
        if options.output == "json":
            screen.write([json.dumps(shown, indent=2)])
        elif options.watch:
            screen.replace(lines)
            time.sleep(_WATCH_SECONDS)
            continue
        else:
            screen.write(lines)
        return 0


def fleet_table(fleet: list[Overview], screen: Screen, now: datetime) -> list[str]:
    """Return a line for each resource, the ones that are not ready first."""
    rows: list[Row] = [("NAMESPACE", "NAME", "READY", "REASON", "PODS", "LOAD", "PROBLEMS", "AGE", "MODEL")]
    for each in sorted(fleet, key=lambda each: (each.ready == "True", each.namespace, each.name)):
        pods = f"{each.replicas['ready']}/{each.replicas['desired']}"
        problems = ", ".join(dict.fromkeys(problem.reason for problem in each.problems)) or "-"
        share = each.load.utilization
        rows.append(
            (
                *(each.namespace, each.name, _coloured(each.ready), each.reason, pods),
                *("-" if share is None else f"{share:.0%}", problems, age_of(each.created, now), each.model),
            )
        )
    return screen.table(rows)


def one_screen(found: Overview, screen: Screen, now: datetime) -> list[str]:
    """Return the lines about one resource."""
    state = {"True": "ready", "False": "not ready"}.get(found.ready, "not known whether ready")
    title = screen.paint(Cell(f"{found.namespace}/{found.name}", "bold"))
    lines = [f"{title}   {screen.paint(Cell(state, _COLOURS[found.ready]))}: {found.reason}", ""]
    facts = [("Model", found.model), ("URL", found.url or "-"), ("Age", age_of(found.created, now))]
    facts += [("Replicas", _replicas(found)), ("Supply", _supply(found)), ("Load", _load(found.load))]
    lines += [f"{name + ':':<11}{value}" for name, value in facts]
    if told := found.autoscaling.get("message"):
        lines += ["Scaling:"[:11].ljust(11) + wrapped(told, _WIDTH, 11)[0].strip(), *wrapped(told, _WIDTH, 11)[1:]]
    lines += ["", *_condition_lines(found, screen, now)]
    lines += ["", *_pod_lines(found, screen, now)]
    if history := found.autoscaling.get("history"):
        lines += ["", screen.paint(Cell("Last changes by the autoscaler", "bold"))]
        for step in history:
            change = f"{step['fromReplicas']} -> {step['toReplicas']}"
            lines.append(f"  {age_of(step['time'], now) + ' ago':<12}{change:<9}{step['reason']}")
            lines += wrapped(step["message"], _WIDTH, 23)
    if found.problems:
        lines += ["", screen.paint(Cell("What to do", "bold"))]
        for problem in found.problems:
            lines.append(f"  {screen.paint(Cell(problem.reason, 'yellow'))} ({problem.type})")
            lines += wrapped(problem.message, _WIDTH, 4)
            lines += wrapped(f"-> {problem.remedy}", _WIDTH, 4)
    return lines


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


def _condition_lines(found: Overview, screen: Screen, now: datetime) -> list[str]:
    rows: list[Row] = [("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE")]
    for each in found.conditions:
        status = _coloured(each["status"]) if each["type"] not in _LIMITS else _limit(each["status"])
        fixed = (each["type"], status, each["reason"], age_of(each["lastTransitionTime"], now))
        rows.append((*fixed, _short(each["message"], 60)))
    return screen.table(rows) if found.conditions else ["no conditions: no operator has handled the resource yet"]


def _pod_lines(found: Overview, screen: Screen, now: datetime) -> list[str]:
    rows: list[Row] = [("POD", "STATE", "RESTARTS", "NODE", "AGE", "MESSAGE")]
    for pod in found.pods:
        age = age_of(pod.created, now)
        rows.append((pod.name, _coloured(pod.state), str(pod.restarts), pod.node, age, _short(pod.message, 80)))
    return screen.table(rows, right=[2]) if found.pods else ["no pods"]


def _coloured(word: str) -> Cell:
    return Cell(word, _COLOURS.get(word, ""))


def _limit(status: str) -> Cell:
    return Cell(status, {"True": "yellow", "False": "green"}.get(status, ""))


def _short(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
