"""The operator's settings: the flags of `fastgen-operator`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pydantic.alias_generators import to_camel

from fastgen_operator.api.fields import CLASS_LIMIT, CLASS_PATTERN
from fastgen_operator.children.platform import (
    DISPENSABLE_KINDS,
    UNKNOWN_NEIGHBOURS,
    Neighbours,
    Platform,
    PodSettings,
)
from fastgen_operator.runtime.leader_election import Terms

_LEASE: Final = "fastgen-operator"


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
        raise argparse.ArgumentTypeError(
            f"{text!r}: give at most {CLASS_LIMIT} lower-case letters, digits and dashes, with no dash at either end"
        )
    return text


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text}: give KEY=VALUE")
    return key, value


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: give a port, from 0 to 65535")
    return int(text)


def _neighbours(text: str) -> Neighbours:
    names = {to_camel(each.name): each.name for each in fields(Neighbours)}
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


def _flag(text: str, default: Any = MISSING, **options: Any) -> Any:
    """Return the field of a flag with this help text.

    Args:
        options: `flag`, if its name is not that of the field, and arguments of `add_argument`.
    """
    return field(default=default, metadata={"help": text, **options})


def _seconds(text: str, default: float) -> Any:
    return _flag(text, default, type=_positive, metavar="S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the operator. Each field has a flag of the same name, or the one that its `flag` names."""

    engine_image: str = _flag("engine image of resources that do not set one")
    namespaces: tuple[str, ...] = _flag(
        "namespace to watch; repeatable; default: all", (), flag="--namespace", action="append", metavar="NAMESPACE"
    )
    operator_class: str | None = _flag(
        "handle the FastGenDeployments with this spec.operatorClass; default: those without a class",
        None,
        type=_class_name,
        metavar="CLASS",
    )
    bind_address: str = _flag("address of the metrics and health servers; :: is all of IPv4 and IPv6", "::")
    metrics_port: int = _flag("port of /metrics", 8080, type=_port, metavar="PORT")
    health_port: int = _flag("port of /healthz and /readyz", 8081, type=_port, metavar="PORT")
    decisions_port: int = _flag(
        "port of /decisions on the loopback interface, for kubectl fastgen", 8082, type=_port, metavar="PORT"
    )
    workers: int = _flag(
        "number of concurrent reconciles, at most half of them (rounded up) of one namespace",
        16,
        type=int,
        choices=range(1, 65),
        metavar="N",
    )
    log_format: Literal["json", "text"] = _flag("format of log lines", "text", choices=("json", "text"))
    verbose: bool = _flag("log every reconcile, and kopf's messages", False, action="store_true")

    without: tuple[str, ...] = _flag(
        "create no children of this kind, and delete existing ones; repeatable",
        (),
        action="append",
        choices=[kind.name for kind in DISPENSABLE_KINDS],
    )
    neighbours: Neighbours = _flag(  # noqa: RUF009  its default is frozen
        "peers of the NetworkPolicies: lists of peers operator, gateway, prometheus and dns, ports dnsPorts, and "
        "egress rules modelSources",
        UNKNOWN_NEIGHBOURS,
        type=_neighbours,
        metavar="JSON",
    )
    pod_monitor_labels: tuple[tuple[str, str], ...] = _flag(
        "label of every PodMonitor, by which Prometheus selects it; repeatable",
        (),
        flag="--pod-monitor-label",
        action="append",
        type=_label,
        metavar="KEY=VALUE",
    )
    gateway_namespace: str | None = _flag(
        "namespace of the gateway's pods; default: there is no gateway, and minReplicas 0 has the effect of 1",
        None,
        metavar="NAMESPACE",
    )
    headroom_class: str = _flag(
        "PriorityClass of the placeholder pods of spec.autoscaling.nodeHeadroom; default: there are none",
        "",
        flag="--headroom-priority-class",
        metavar="NAME",
    )
    http_proxy: str = _flag("proxy of the engines and downloads for HTTP", "", type=_proxy, metavar="URL")
    https_proxy: str = _flag("proxy of the engines and downloads for HTTPS", "", type=_proxy, metavar="URL")
    no_proxy: str = _flag(
        "hosts that engines and downloads reach without a proxy, separated by commas", "", metavar="HOSTS"
    )
    ca_config_map: str = _flag(
        "ConfigMap in each resource's namespace with the certificate authorities to trust", "", metavar="NAME"
    )
    ca_key: str = _flag("key of that ConfigMap with the certificates, in PEM", "ca.crt", metavar="KEY")
    image_pull_secrets: tuple[str, ...] = _flag(
        "Secret in each resource's namespace with which images are pulled; repeatable",
        (),
        flag="--image-pull-secret",
        action="append",
        metavar="NAME",
    )
    fixed_user: bool = _flag(
        "leave the user and groups of pods to the cluster, for example to OpenShift",
        True,
        flag="--no-fixed-user",
        action="store_false",
    )

    pod_template: Literal["restricted", "any"] = _flag(
        "what spec.podTemplate may contain: restricted refuses what violates the restricted Pod Security Standard",
        "restricted",
        choices=("restricted", "any"),
    )

    resync_seconds: float = _seconds(
        "interval between reconciles of all resources from the cache; ready ones that have not changed are skipped for "
        "up to ten minutes",
        30.0,
    )
    relist_seconds: float = _seconds("interval between full lists, which find changes that a watch missed", 300.0)
    retry_seconds: float = _seconds("first backoff after a failed reconcile; it doubles with each failure", 1.0)
    retry_limit_seconds: float = _seconds("longest backoff after failed reconciles", 60.0)
    scrape_seconds: float = _seconds("interval between scrapes of the replicas of autoscaled resources", 5.0)
    request_seconds: float = _seconds("timeout of a request to the API server", 30.0)
    silence_seconds: float = _seconds(
        "reopen a watch without an event for this long; a bookmark comes every minute", 70.0
    )
    stall_seconds: float = _seconds(
        "fail the liveness probe after this long without progress; for resyncs and watches, after at least three "
        "resync intervals",
        90.0,
    )
    stop_seconds: float = _seconds("how long running reconciles may take to end after SIGTERM", 15.0)

    leader_elect: bool = _flag(
        "run without leader election, as the only operator", True, flag="--no-leader-elect", action="store_false"
    )
    lease_name: str | None = _flag(f"name of the Lease; default: {_LEASE}, or {_LEASE}-CLASS with a class", None)
    lease_namespace: str | None = _flag("namespace of the Lease; default: the pod's own", None)
    lease_seconds: int = _flag("validity of the Lease after its last renewal", 15, type=int, metavar="S")
    lease_renew_seconds: float = _seconds("a leader that cannot renew the Lease for this long exits", 10.0)
    lease_retry_seconds: float = _seconds("interval between attempts to acquire or renew the Lease", 2.0)

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """The namespaces to list; (None,) for all."""
        return self.namespaces or (None,)

    @property
    def lease(self) -> str:
        """The name of the Lease. By default it contains the class: operators of different classes elect separately."""
        return self.lease_name or "-".join(filter(None, (_LEASE, self.operator_class)))

    @property
    def terms(self) -> Terms:
        """Times of the leader election."""
        return Terms(self.lease_seconds, self.lease_renew_seconds, self.lease_retry_seconds)

    @property
    def pods(self) -> PodSettings:
        """Settings of all pods that the operator creates."""
        return PodSettings(**{each.name: getattr(self, each.name) for each in fields(PodSettings)})

    @property
    def platform(self) -> Platform:
        """The part of the platform that is known without a request."""
        without, has_gateway = frozenset(self.without), self.gateway_namespace is not None
        return Platform(
            *(self.engine_image, frozenset(), without, self.neighbours, self.pod_monitor_labels, self.pods),
            has_gateway=has_gateway,
            headroom_class=self.headroom_class,
        )


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Parse a command line. Exits with code 2 and a message on an invalid one."""
    parser = argparse.ArgumentParser(
        prog="fastgen-operator", description="Turn FastGenDeployments into pods and keep them healthy."
    )
    for each in fields(Settings):
        options: dict[str, Any] = {
            "dest": each.name,
            "required": each.default is MISSING,
            "default": each.default,
            **each.metadata,
        }
        flag = options.pop("flag", f"--{each.name.replace('_', '-')}")
        # argparse appends to lists, so the default of a repeatable flag is a list instead of a tuple.
        parser.add_argument(flag, **options | ({"default": []} if each.default == () else {}))
    given = vars(parser.parse_args(arguments)).items()
    chosen: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
    settings = Settings(**chosen)
    if not settings.lease_retry_seconds < settings.lease_renew_seconds < settings.lease_seconds:
        parser.error("--lease-retry-seconds must be below --lease-renew-seconds, and that below --lease-seconds")
    if settings.stall_seconds <= settings.request_seconds:
        parser.error("--stall-seconds must be above --request-seconds: the operator waits that long for a response")
    return settings
