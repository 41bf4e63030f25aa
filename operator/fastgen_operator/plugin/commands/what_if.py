"""`kubectl fastgen what-if`: replay the recorded arrivals with another number of replicas or another target."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastgen_operator.autoscale.decision import counted
from fastgen_operator.autoscale.journal import Journal
from fastgen_operator.autoscale.rehearsal.learning import Rehearsal
from fastgen_operator.autoscale.rehearsal.replay import FleetModel, Outcome, replay
from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.plugin.commands.explain_scaling import add_operator_argument, fetch
from fastgen_operator.plugin.screen import Row, Screen, wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", metavar="NAME", help="the FastGenDeployment")
    parser.add_argument(
        "--replicas",
        type=_positive,
        metavar="N",
        help="also replay with at least, and with exactly, this many replicas",
    )
    parser.add_argument(
        "--target-first-token",
        type=_positive,
        metavar="MS",
        help="first-token target in milliseconds; default: that of the spec",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="format of the output")
    add_operator_argument(parser)


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Replay the arrivals and print the results."""
    key = (cluster.namespace, options.name)
    resource = cluster.resource(options.name)
    _, _, journal = fetch(cluster, options.operator_namespace, key)
    rehearsal = rehearsed(options.name, resource, journal)
    variants = replayed(rehearsal, options.replicas, options.target_first_token)
    if options.output == "json":
        screen.write_json({"variants": [variant.to_json() for variant in variants]})
        return 0
    model = variants[0].model
    known = variants[0].outcome.seconds / 3600
    heading = screen.paint("/".join(key), "bold")
    words = (
        f"{heading}: the arrivals of the last {known:.1f} h, replayed with the autoscaler's rules on a model of "
        f"the fleet: {model.tokens_per_second:,.0f} tokens/s for a replica, which takes {model.start_seconds:.0f} s to "
        f"start; first tokens within {1000 * model.policy.first_token_seconds:,.0f} ms"
    )
    rows: list[Row] = [("Replicas", "In time", "Replica-hours", "Bursts with late requests")]
    rows += [variant.row() for variant in variants]
    screen.write([*wrapped(words, 0), "", *screen.table(rows, right=(1, 2, 3))])
    return 0


@dataclass(frozen=True, slots=True)
class Variant:
    """The outcome of the recorded arrivals with some settings."""

    title: str
    model: FleetModel
    outcome: Outcome

    def row(self) -> Row:
        """Return the row of the table."""
        outcome = self.outcome
        hours = f"{outcome.replica_seconds / 3600:.1f}"
        return self.title, f"{100 * outcome.attainment:.1f} %", hours, str(outcome.bursts)

    def to_json(self) -> dict[str, Any]:
        """Return the variant as JSON values."""
        policy, outcome = self.model.policy, self.outcome
        return {
            "settings": self.title,
            "minReplicas": policy.min_replicas,
            "maxReplicas": policy.max_replicas,
            "firstTokenMilliseconds": round(1000 * policy.first_token_seconds),
            "attainment": outcome.attainment,
            "replicaHours": outcome.replica_seconds / 3600,
            "bursts": outcome.bursts,
            "seconds": outcome.seconds,
        }


def rehearsed(name: str, resource: Mapping[str, Any], journal: Journal) -> Rehearsal:
    """Return the inputs of the last rehearsal; raise PluginError if there is none."""
    if journal.rehearsal is not None:
        return journal.rehearsal
    autoscaling = resource["spec"].get("autoscaling", {})
    if autoscaling.get("learning") == "Disabled":
        raise PluginError(f"{name} has spec.autoscaling.learning: Disabled: no arrivals are recorded")
    if autoscaling.get("minReplicas") == 0:
        raise PluginError(f"{name} has spec.autoscaling.minReplicas: 0: no arrivals are recorded")
    raise PluginError(
        f"the operator has not rehearsed the arrivals of {name} yet: the first time is ten minutes after it starts"
    )


def replayed(rehearsal: Rehearsal, replicas: int | None, first_token_milliseconds: int | None) -> list[Variant]:
    """Return the outcome of the present settings, and of a number of replicas as lower bound and as fixed size."""
    model, rates = rehearsal.model, rehearsal.rates
    if first_token_milliseconds is not None:
        model = model.with_first_token(first_token_milliseconds / 1000)
    bounds = {f"present, {model.policy.min_replicas} to {model.policy.max_replicas}": model}
    if replicas is not None:
        most = max(replicas, model.policy.max_replicas)
        bounds[f"at least {counted(replicas)}"] = model.with_bounds(replicas, most)
        bounds[f"exactly {counted(replicas)}"] = model.with_bounds(replicas, replicas)
    return [Variant(title, each, replay(each, rates)) for title, each in bounds.items()]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least 1")
    return value
