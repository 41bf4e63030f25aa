"""The operator's settings: the flags of `fastgen-operator`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from fastgen_operator.api.fields import CLASS_LIMIT, CLASS_PATTERN
from fastgen_operator.children import DISPENSABLE_KINDS, Platform
from fastgen_operator.children.network_policy import UNKNOWN_NEIGHBOURS, Neighbours
from fastgen_operator.children.pod_settings import PLAIN_PODS, PodSettings
from fastgen_operator.runtime.leader_election import DEFAULT_TERMS, Terms

_LEASE: Final = "fastgen-operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the operator.

    Attributes:
        engine_image: engine image of resources that do not set one.
        namespaces: the watched namespaces; empty for all.
        operator_class: the class of the resources to reconcile; None for those without a class.
        bind_address, metrics_port, health_port: address and ports of /metrics, and of /healthz and /readyz.
        decisions_port: port of the last decisions, on the loopback interface only.
        resync_seconds: interval between reconciles of all resources from the cache.
        relist_seconds: interval between full lists, which find changes that a watch missed.
        retry_seconds, retry_limit_seconds: first and longest backoff after a failed reconcile; it doubles in between.
        workers: number of concurrent reconciles.
        without: names of the kinds of children that are not created.
        neighbours: peers in the cluster's network, for the NetworkPolicies.
        pod_monitor_labels: labels of every PodMonitor, by which Prometheus selects it.
        pods: settings of all pods that the operator creates.
        scrape_seconds: interval between scrapes of the replicas of autoscaled resources.
        lease_name, lease_namespace: the leader election's Lease; the namespace defaults to the pod's own.
        leader_elect: False for a single operator, which needs no Lease.
        terms: times of the leader election.
        request_seconds: timeout of a request to the API server.
        silence_seconds: a watch without an event for this long is reopened; a bookmark comes every minute.
        stall_seconds: the liveness probe fails after this long without progress; longer than a request may take.
        stop_seconds: how long running reconciles may take to end after SIGTERM.
    """

    engine_image: str
    namespaces: tuple[str, ...] = ()
    operator_class: str | None = None
    bind_address: str = "0.0.0.0"
    metrics_port: int = 8080
    health_port: int = 8081
    decisions_port: int = 8082
    resync_seconds: float = 30.0
    relist_seconds: float = 300.0
    retry_seconds: float = 1.0
    retry_limit_seconds: float = 60.0
    workers: int = 10
    without: tuple[str, ...] = ()
    neighbours: Neighbours = UNKNOWN_NEIGHBOURS
    pod_monitor_labels: tuple[tuple[str, str], ...] = ()
    pods: PodSettings = PLAIN_PODS
    scrape_seconds: float = 5.0
    lease_name: str | None = None
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
        """The namespaces to list; (None,) for all."""
        return self.namespaces or (None,)

    @property
    def lease(self) -> str:
        """The name of the Lease.

        The default contains the class: operators of different classes elect separately.
        """
        return self.lease_name or "-".join(filter(None, (_LEASE, self.operator_class)))

    @property
    def platform(self) -> Platform:
        """The part of the platform that is known without a request."""
        return Platform(
            self.engine_image,
            without=frozenset(self.without),
            neighbours=self.neighbours,
            pod_monitor_labels=self.pod_monitor_labels,
            pods=self.pods,
        )


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Parse a command line. Exits with code 2 and a message on an invalid one."""
    parser = argparse.ArgumentParser(
        prog="fastgen-operator", description="Turn FastGenDeployments into pods and keep them healthy."
    )
    # argparse appends to lists, so repeatable flags default to a list instead of a tuple.
    defaults = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    parser.set_defaults(**{name: list(value) if value == () else value for name, value in defaults.items()})
    parser.add_argument(
        "--namespace", action="append", dest="namespaces", help="namespace to watch; repeatable; default: all"
    )
    parser.add_argument(
        "--operator-class",
        type=_class_name,
        metavar="CLASS",
        help="handle the FastGenDeployments with this spec.operatorClass; default: those without a class",
    )
    parser.add_argument("--engine-image", required=True, help="engine image of resources that do not set one")
    parser.add_argument("--bind-address", help="address of the metrics and health servers")
    parser.add_argument("--metrics-port", type=int, help="port of /metrics")
    parser.add_argument("--health-port", type=int, help="port of /healthz and /readyz")
    parser.add_argument(
        "--decisions-port", type=int, help="port of /decisions on the loopback interface, for kubectl fastgen"
    )
    parser.add_argument(
        "--workers", type=int, choices=range(1, 65), metavar="N", help="number of concurrent reconciles"
    )
    parser.add_argument("--log-format", choices=("json", "text"))
    parser.add_argument("--verbose", action="store_true", help="log every reconcile, and kopf's messages")
    _add_children(parser)
    _add_pods(parser)
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
    if chosen["stall_seconds"] <= chosen["request_seconds"]:
        parser.error("--stall-seconds must be above --request-seconds: the operator waits that long for a response")
    pods = PodSettings(**{field.name: chosen.pop(field.name) for field in fields(PodSettings)})
    return Settings(**{**chosen, "terms": terms, "pods": pods})


def _add_children(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without",
        action="append",
        choices=[kind.name for kind in DISPENSABLE_KINDS],
        help="create no children of this kind, and delete existing ones; repeatable",
    )
    parser.add_argument(
        "--neighbours",
        type=_neighbours,
        metavar="JSON",
        help="peers of the NetworkPolicies: lists of peers operator, prometheus and dns, ports dnsPorts, and egress "
        "rules modelSources",
    )
    parser.add_argument(
        "--pod-monitor-label",
        action="append",
        type=_label,
        dest="pod_monitor_labels",
        metavar="KEY=VALUE",
        help="label of every PodMonitor, by which Prometheus selects it; repeatable",
    )


def _add_pods(parser: argparse.ArgumentParser) -> None:
    for flag in ("--http-proxy", "--https-proxy"):
        parser.add_argument(flag, type=_proxy, default="", metavar="URL", help="proxy for the engines and downloads")
    parser.add_argument("--no-proxy", default="", metavar="HOSTS", help="hosts that they reach without a proxy")
    parser.add_argument(
        "--ca-config-map", default="", metavar="NAME", help="ConfigMap in their namespace with the authorities to trust"
    )
    parser.add_argument("--ca-key", default=PLAIN_PODS.ca_key, metavar="KEY", help="its key with the certificates")
    parser.add_argument(
        "--image-pull-secret",
        action="append",
        default=[],
        dest="image_pull_secrets",
        metavar="NAME",
        help="Secret in their namespace with which their images are pulled; repeatable",
    )
    parser.add_argument(
        "--no-fixed-user",
        action="store_false",
        dest="fixed_user",
        help="leave the user and groups of pods to the cluster, for example to OpenShift",
    )


def _add_times(parser: argparse.ArgumentParser) -> None:
    for flag, text in (
        ("--resync-seconds", "interval between reconciles of all resources from the cache"),
        ("--relist-seconds", "interval between full lists, which find changes that a watch missed"),
        ("--retry-seconds", "first backoff after a failed reconcile"),
        ("--retry-limit-seconds", "longest backoff after failed reconciles"),
        ("--scrape-seconds", "interval between scrapes of the replicas of autoscaled resources"),
        ("--request-seconds", "timeout of a request to the API server"),
        ("--silence-seconds", "reopen a watch without an event for this long; a bookmark comes every minute"),
        ("--stall-seconds", "fail the liveness probe after this long without progress"),
        ("--stop-seconds", "how long running reconciles may take to end after SIGTERM"),
    ):
        parser.add_argument(flag, type=_positive, metavar="S", help=text)


def _add_election(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-leader-elect",
        action="store_false",
        dest="leader_elect",
        help="run without leader election, as the only operator",
    )
    parser.add_argument("--lease-name", help=f"name of the Lease; default: {_LEASE}, or {_LEASE}-CLASS with a class")
    parser.add_argument("--lease-namespace", help="namespace of the Lease; default: the pod's own")
    for flag, name, kind, text in (
        ("--lease-seconds", "duration", int, "validity of the Lease after its last renewal"),
        ("--lease-renew-seconds", "renew", _positive, "a leader that cannot renew the Lease for this long exits"),
        ("--lease-retry-seconds", "retry", _positive, "interval between attempts to acquire or renew the Lease"),
    ):
        default = getattr(DEFAULT_TERMS, name)
        parser.add_argument(flag, dest=name, type=kind, default=default, metavar="S", help=text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a number of seconds above 0")
    return number


def _proxy(text: str) -> str:
    try:
        parts = urlsplit(text)
        valid = not text or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text}: give a URL such as http://proxy.example:3128")
    return text


def _class_name(text: str) -> str:
    if len(text) > CLASS_LIMIT or not re.fullmatch(CLASS_PATTERN, text):
        raise argparse.ArgumentTypeError(f"{text!r}: give at most {CLASS_LIMIT} lower-case letters, digits and dashes")
    return text


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text}: give KEY=VALUE")
    return key, value


def _neighbours(text: str) -> Neighbours:
    names = {
        "operator": "operator",
        "prometheus": "prometheus",
        "dns": "dns",
        "dnsPorts": "dns_ports",
        "modelSources": "model_sources",
    }
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(given, dict) or not given.keys() <= names.keys():
        raise argparse.ArgumentTypeError(f"give an object with lists named {', '.join(names)}")
    for name, rules in given.items():
        kind, items = (int, "port numbers") if name == "dnsPorts" else (dict, "objects")
        if not isinstance(rules, list) or not all(isinstance(rule, kind) for rule in rules):
            raise argparse.ArgumentTypeError(f"{name}: give a list of {items}")
    return Neighbours(**{names[name]: tuple(rules) for name, rules in given.items()})
