"""`kubectl fastgen top`: live load and latency of all pods of a FastGenDeployment."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import Cluster, PluginError, UsageError
from fastgen_operator.plugin.engine_metrics import Figures, MetricsReader, load_between, milliseconds, serving
from fastgen_operator.plugin.screen import Cell, Row, Screen

_LEAST, _MOST = 0.1, 3600.0
_HEADER: Final = (
    *("POD", "STATE", "PROMPT/S", "DECODE/S", "STEP", "RUNNING", "WAITING", "BACKLOG", "KV"),
    *("FIRST P50", "P99", "BETWEEN P50", "P99"),
)
_NUMBERS: Final = range(2, len(_HEADER))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", metavar="NAME", help="the FastGenDeployment")
    parser.add_argument(
        "--interval", type=float, default=2.0, help="seconds between two scrapes (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print one interval and exit")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="json requires --once")


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Show the view until interrupted, or once."""
    if not _LEAST <= options.interval <= _MOST:
        raise UsageError(f"--interval {options.interval}: give {_LEAST} to {_MOST:.0f} seconds")
    if options.output == "json" and not options.once:
        raise UsageError("--output json requires --once")
    cluster.resource(options.name)
    reader = MetricsReader(cluster)
    before = reader.read(serving(cluster.pods_and_canary(options.name)))
    if before and all(isinstance(each, PluginError) for each in before.values()):
        raise next(each for each in before.values() if isinstance(each, PluginError))
    while True:
        time.sleep(options.interval)
        pods = cluster.pods_and_canary(options.name)
        after = reader.read(serving(pods))
        found, whole = load_between(before, after)
        if options.output == "json":
            screen.write_json(_to_json(pods, found, whole))
        else:
            lines = view(f"{cluster.namespace}/{options.name}", pods, found, whole, screen)
            (screen.write if options.once else screen.replace)(lines)
        if options.once:
            return 0
        before = after


def view(
    title: str, pods: Sequence[Pod], found: dict[str, Figures | str], whole: Figures | None, screen: Screen
) -> list[str]:
    """Return a table of pods and their total, a canary's included; `found`: figures, or why there are none."""
    rows: list[Row] = [_HEADER]
    notes = []
    for pod in pods:
        name, figures = f"{pod.name} canary" if pod.is_canary else pod.name, found.get(pod.name)
        if isinstance(figures, Figures):
            rows.append((name, _state(pod), *_cells(figures)))
            continue
        rows.append((name, _state(pod), *("-" for _ in _NUMBERS)))
        if figures:
            notes.append(f"{name}: {figures}")
    if whole is not None:
        rows.append((Cell("all", "bold"), "", *_cells(whole)))
    legend = (
        "STEP: used share of the token budget of a step. FIRST, BETWEEN: milliseconds to the first token, between two."
    )
    table = screen.table(rows, right=_NUMBERS)
    return [screen.paint(title, "bold"), "", *table, "", screen.paint(legend, "dim"), *notes]


def _cells(figures: Figures) -> tuple[Cell | str, ...]:
    queue = Cell(f"{figures.waiting:.0f}", "yellow" if figures.waiting else "")
    return (
        *(f"{figures.prompt_tokens:,.0f}", f"{figures.decode_tokens:,.0f}", f"{figures.step:.0%}"),
        *(f"{figures.running:.0f}", queue, f"{figures.backlog_tokens:,.0f}"),
        Cell(f"{figures.kv_cache:.0%}", "yellow" if figures.kv_cache >= 0.9 else ""),
        *map(milliseconds, (*figures.first_token, *figures.inter_token)),
    )


def _state(pod: Pod) -> Cell:
    if pod.is_terminating:
        return Cell("Draining", "cyan")
    return Cell("Ready", "green") if pod.is_ready else Cell("NotReady", "yellow")


def _to_json(pods: Sequence[Pod], found: dict[str, Figures | str], whole: Figures | None) -> dict[str, Any]:
    canaries = {pod.name for pod in pods if pod.is_canary}
    shown = {
        name: {**(asdict(each) if isinstance(each, Figures) else {"error": each}), "canary": name in canaries}
        for name, each in found.items()
    }
    return {"pods": shown, "all": None if whole is None else asdict(whole)}
