"""The operator's own settings, each a flag of `fastgen-operator`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from fastgen_operator.children import DISPENSABLE_KINDS, Platform
from fastgen_operator.children.network import UNKNOWN_NEIGHBOURS, Neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the operator runs.

    Attributes:
        engine_image: image of the engine where a resource names none.
        namespaces: the namespaces watched; empty for all.
        bind_address, metrics_port, health_port: where /metrics and /healthz are served.
        resync_seconds: how often every resource is visited without any event, from memory.
        relist_seconds: how often everything is read anew, in case that a watch has missed something.
        retry_seconds, retry_limit_seconds: first and longest wait after a failed visit; it doubles in between.
        workers: resources visited at the same time.
        without: kinds of children that are not made, by name.
        neighbours: who is who in the cluster's network, for the NetworkPolicies.
        pod_monitor_labels: labels of every PodMonitor, by which a Prometheus finds it.
        scrape_seconds: how often the replicas of autoscaled resources are asked for their metrics.
    """

    engine_image: str
    namespaces: tuple[str, ...] = ()
    bind_address: str = "0.0.0.0"
    metrics_port: int = 8080
    health_port: int = 8081
    resync_seconds: float = 30.0
    relist_seconds: float = 300.0
    retry_seconds: float = 1.0
    retry_limit_seconds: float = 60.0
    workers: int = 4
    without: tuple[str, ...] = ()
    neighbours: Neighbours = UNKNOWN_NEIGHBOURS
    pod_monitor_labels: tuple[tuple[str, str], ...] = ()
    scrape_seconds: float = 5.0
    log_format: Literal["json", "text"] = "text"
    verbose: bool = False

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """The namespaces to list; (None,) for all of them."""
        return self.namespaces or (None,)

    @property
    def platform(self) -> Platform:
        """What is known of the cluster before it is asked."""
        return Platform(
            self.engine_image,
            without=frozenset(self.without),
            neighbours=self.neighbours,
            pod_monitor_labels=self.pod_monitor_labels,
        )


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from a command line. Ends the process with code 2 and one line where it is wrong."""
    default = {field.name: field.default for field in fields(Settings)}
    parser = argparse.ArgumentParser(
        prog="fastgen-operator", description="Turn FastGenDeployments into pods and keep them healthy."
    )
    parser.add_argument(
        "--namespace", action="append", default=[], dest="namespaces", help="watch this namespace; repeatable; all"
    )
    parser.add_argument("--engine-image", required=True, help="image of the engine where a resource names none")
    parser.add_argument("--bind-address", default=default["bind_address"], help="address of metrics and health")
    parser.add_argument("--metrics-port", type=int, default=default["metrics_port"], help="port of /metrics")
    parser.add_argument("--health-port", type=int, default=default["health_port"], help="port of /healthz")
    parser.add_argument(
        "--resync-seconds",
        type=_positive,
        default=default["resync_seconds"],
        help="visit every resource this often without any event",
    )
    parser.add_argument(
        "--relist-seconds",
        type=_positive,
        default=default["relist_seconds"],
        help="read everything anew this often, in case that a watch has missed something",
    )
    parser.add_argument(
        "--retry-seconds", type=_positive, default=default["retry_seconds"], help="first wait after a failed visit"
    )
    parser.add_argument(
        "--retry-limit-seconds",
        type=_positive,
        default=default["retry_limit_seconds"],
        help="longest wait after failed visits",
    )
    parser.add_argument("--workers", type=int, default=default["workers"], choices=range(1, 65), metavar="N")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=[kind.name for kind in DISPENSABLE_KINDS],
        help="make no children of this kind, and take away those that are there; repeatable",
    )
    parser.add_argument(
        "--neighbours",
        type=_neighbours,
        default=default["neighbours"],
        metavar="JSON",
        help="for the NetworkPolicies: lists of peers named operator, prometheus and dns, of egress rules modelSources",
    )
    parser.add_argument(
        "--pod-monitor-label",
        action="append",
        type=_label,
        default=[],
        dest="pod_monitor_labels",
        metavar="KEY=VALUE",
        help="a label of every PodMonitor, by which a Prometheus finds it; repeatable",
    )
    parser.add_argument(
        "--scrape-seconds",
        type=_positive,
        default=default["scrape_seconds"],
        help="ask the replicas of autoscaled resources for their metrics this often",
    )
    parser.add_argument("--log-format", choices=("json", "text"), default=default["log_format"])
    parser.add_argument("--verbose", action="store_true", help="log every visit, and what kopf does")
    chosen = vars(parser.parse_args(arguments))
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()
    }
    return Settings(**settings)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a number of seconds above 0")
    return number


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text}: give KEY=VALUE")
    return key, value


def _neighbours(text: str) -> Neighbours:
    names = {"operator": "operator", "prometheus": "prometheus", "dns": "dns", "modelSources": "model_sources"}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(given, dict) or not given.keys() <= names.keys():
        raise argparse.ArgumentTypeError(f"give an object with lists named {', '.join(names)}")
    for name, rules in given.items():
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise argparse.ArgumentTypeError(f"{name}: give a list of objects")
    return Neighbours(**{names[name]: tuple(rules) for name, rules in given.items()})
