"""The operator's own settings, each a flag of `fastgen-operator`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from fastgen_operator.children import DISPENSABLE_KINDS, Platform
from fastgen_operator.children.network_policy import UNKNOWN_NEIGHBOURS, Neighbours
from fastgen_operator.runtime.leader_election import DEFAULT_TERMS, Terms


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
        lease_name, lease_namespace: the Lease by which one of several operators is elected; the namespace is the
            pod's own where not given.
        leader_elect: False where there is only one operator, which then needs no Lease.
        terms: the election's times.
        request_seconds: a request that the API server does not answer for this long has failed.
        silence_seconds: a watch that says nothing for this long, where a bookmark comes each minute, is opened again.
        stall_seconds: work that makes no progress for this long makes the liveness probe fail.
        stop_seconds: how long visits under way may take to end after SIGTERM.
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
    lease_name: str = "fastgen-operator"
    lease_namespace: str | None = None
    leader_elect: bool = True
    terms: Terms = DEFAULT_TERMS
    request_seconds: float = 30.0
    silence_seconds: float = 70.0
    stall_seconds: float = 90.0
    stop_seconds: float = 15.0
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
    parser = argparse.ArgumentParser(
        prog="fastgen-operator", description="Turn FastGenDeployments into pods and keep them healthy."
    )
    # A list in place of each tuple, for the flags that may be repeated.
    defaults = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    parser.set_defaults(**{name: list(value) if value == () else value for name, value in defaults.items()})
    parser.add_argument("--namespace", action="append", dest="namespaces", help="watch this namespace; repeatable; all")
    parser.add_argument("--engine-image", required=True, help="image of the engine where a resource names none")
    parser.add_argument("--bind-address", help="address of metrics and health")
    parser.add_argument("--metrics-port", type=int, help="port of /metrics")
    parser.add_argument("--health-port", type=int, help="port of /healthz and /readyz")
    parser.add_argument("--workers", type=int, choices=range(1, 65), metavar="N", help="resources visited at once")
    parser.add_argument("--log-format", choices=("json", "text"))
    parser.add_argument("--verbose", action="store_true", help="log every visit, and what kopf does")
    _add_children(parser)
    _add_times(parser)
    _add_election(parser)
    chosen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(parser.parse_args(arguments)).items()
    }
    try:
        terms = Terms(chosen.pop("duration"), chosen.pop("renew"), chosen.pop("retry"))
    except ValueError:
        parser.error("--lease-retry-seconds must be below --lease-renew-seconds, and that below --lease-seconds")
    return Settings(**{**chosen, "terms": terms})


def _add_children(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without",
        action="append",
        choices=[kind.name for kind in DISPENSABLE_KINDS],
        help="make no children of this kind, and take away those that are there; repeatable",
    )
    parser.add_argument(
        "--neighbours",
        type=_neighbours,
        metavar="JSON",
        help="for the NetworkPolicies: lists of peers named operator, prometheus and dns, of egress rules modelSources",
    )
    parser.add_argument(
        "--pod-monitor-label",
        action="append",
        type=_label,
        dest="pod_monitor_labels",
        metavar="KEY=VALUE",
        help="a label of every PodMonitor, by which a Prometheus finds it; repeatable",
    )


def _add_times(parser: argparse.ArgumentParser) -> None:
    for flag, text in (
        ("--resync-seconds", "visit every resource this often without any event"),
        ("--relist-seconds", "read everything anew this often, in case that a watch has missed something"),
        ("--retry-seconds", "first wait after a failed visit"),
        ("--retry-limit-seconds", "longest wait after failed visits"),
        ("--scrape-seconds", "ask the replicas of autoscaled resources for their metrics this often"),
        ("--request-seconds", "a request that is not answered for this long has failed"),
        ("--silence-seconds", "a watch that says nothing for this long is opened again; bookmarks come each minute"),
        ("--stall-seconds", "no progress for this long makes the liveness probe fail"),
        ("--stop-seconds", "how long visits under way may take to end after SIGTERM"),
    ):
        parser.add_argument(flag, type=_positive, metavar="S", help=text)


def _add_election(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-leader-elect", action="store_false", dest="leader_elect", help="there is only this one")
    parser.add_argument("--lease-name", help="the Lease by which one of several operators is elected")
    parser.add_argument("--lease-namespace", help="its namespace; the pod's own where not given")
    terms = DEFAULT_TERMS
    for flag, name, kind, value, text in (
        ("--lease-seconds", "duration", int, terms.duration, "others take the lease this long after its last renewal"),
        ("--lease-renew-seconds", "renew", _positive, terms.renew, "a leader that cannot renew for this long ends"),
        ("--lease-retry-seconds", "retry", _positive, terms.retry, "between two tries to take or renew the lease"),
    ):
        parser.add_argument(flag, dest=name, type=kind, default=value, metavar="S", help=text)


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
