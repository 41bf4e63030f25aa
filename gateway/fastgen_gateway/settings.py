"""The picker's settings, from the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastgen.logs import FORMATS
from fastgen.version import VERSION
from fastgen_gateway.client_files import ClientPaths
from fastgen_gateway.cluster.api_server import Credentials
from fastgen_gateway.routing.held_requests import HoldLimits

# What the kubelet mounts into a pod with a ServiceAccount's token.
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Envoy waits at most an hour for the picker.
_MOST_SECONDS: Final = 3500.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings.

    Attributes:
        api_server: how to reach the API server.
        namespaces: those to serve; empty for all.
        limits: of held requests.
        body_seconds: how long the body of a request may take to arrive.
        max_bodies_bytes: maximum bytes of the large bodies in transit.
        clients: where API keys and limits of clients are; None if requests need no key.
        pool_certificate: folder for the certificate that Envoy shows to Gateways in front of InferencePools; None if
            Envoy needs none.
        picker_address, picker_port: of the gRPC server for Envoy.
        admin_port: of Envoy's admin interface.
        http_address, http_port: of the HTTP server for the operator, Prometheus and the kubelet; without an address, it
            listens on all.
        log_format: one of `fastgen.logs.FORMATS`.
    """

    api_server: Credentials
    namespaces: tuple[str, ...]
    limits: HoldLimits
    body_seconds: float
    max_bodies_bytes: int
    clients: ClientPaths | None
    pool_certificate: Path | None
    picker_address: str
    picker_port: int
    admin_port: int
    http_address: str | None
    http_port: int
    log_format: str


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Parse the command line. Exits with code 2 if it is invalid."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not 0 < options.hold_seconds <= _MOST_SECONDS:
        parser.error(f"--hold-seconds {options.hold_seconds:g}: set it to more than 0 and at most {_MOST_SECONDS:g}")
    if not options.body_seconds > 0:
        parser.error(f"--body-seconds {options.body_seconds:g}: set it to more than 0")
    for flag in ("max_held_requests", "max_held_bytes", "max_bodies_bytes"):
        if getattr(options, flag) < 0:
            parser.error(f"--{flag.replace('_', '-')} {getattr(options, flag)}: set it to 0 or more")
    return Settings(
        _credentials(parser, options),
        tuple(options.namespace),
        HoldLimits(options.hold_seconds, options.max_held_requests, options.max_held_bytes),
        options.body_seconds,
        options.max_bodies_bytes,
        _clients(parser, options),
        options.pool_certificate,
        options.picker_address,
        options.picker_port,
        options.admin_port,
        options.http_address,
        options.http_port,
        options.log_format,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastgen-gateway", description="The picker of a gateway pod: tells Envoy which replica answers a request."
    )
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument(
        "--api-server",
        metavar="URL",
        help="of the API server, for example of `kubectl proxy`; default: that of the cluster whose pod this is",
    )
    parser.add_argument("--token-file", type=Path, help="bearer token for the API server; default: the pod's, if any")
    parser.add_argument(
        "--ca-file", type=Path, help="certificates of the API server's authority; default: the pod's, if any"
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="namespace whose FastGenDeployments are served; repeat it for several; default: all",
    )
    default = HoldLimits()
    parser.add_argument(
        "--hold-seconds",
        type=float,
        default=default.seconds,
        help=f"how long a request waits for a ready replica, at most {_MOST_SECONDS:g} s; default: %(default)g",
    )
    parser.add_argument(
        "--body-seconds",
        type=float,
        default=120.0,
        help="how long the body of a request may take to arrive; a slower one gets 408; default: %(default)g",
    )
    parser.add_argument(
        "--max-bodies-bytes",
        type=int,
        default=192 << 20,
        help="maximum bytes of bodies in transit, not counting those of up to 64 KiB; beyond it, requests get 503; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--max-held-requests",
        type=int,
        default=default.requests,
        help="how many requests wait at a time; more are rejected with 429; default: %(default)s",
    )
    parser.add_argument(
        "--max-held-bytes",
        type=int,
        default=default.bytes,
        help="how large the bodies of waiting requests are together; more are rejected with 429; default: %(default)s",
    )
    parser.add_argument(
        "--client-keys",
        metavar="FOLDER",
        type=Path,
        help="folder with a file for each client, named after it, with an API key per line; read again when it "
        "changes; default: requests need no key",
    )
    parser.add_argument(
        "--client-limits",
        metavar="FILE",
        type=Path,
        help="JSON file with the limits and priorities of clients; read again when it changes; default: none",
    )
    parser.add_argument(
        "--engine-keys",
        metavar="FOLDER",
        type=Path,
        help="folder with a file for each namespace (NAMESPACE) or FastGenDeployment (NAMESPACE.NAME), with the API "
        "key for its engines; read again when it changes; default: engines get no key",
    )
    parser.add_argument(
        "--pool-certificate",
        metavar="FOLDER",
        type=Path,
        help="folder to which a self-signed certificate for Gateways in front of InferencePools is written, for Envoy; "
        "default: none",
    )
    parser.add_argument(
        "--picker-address", default="127.0.0.1", help="address of the gRPC server for Envoy; default: %(default)s"
    )
    parser.add_argument("--picker-port", type=int, default=9002, help="its port; default: %(default)s")
    parser.add_argument(
        "--admin-port", type=int, default=9901, help="port of Envoy's admin interface; default: %(default)s"
    )
    parser.add_argument(
        "--http-address",
        help="address of the HTTP server with demand, metrics and probes; default: all of IPv6 and IPv4",
    )
    parser.add_argument("--http-port", type=int, default=9003, help="its port; default: %(default)s")
    parser.add_argument("--log-format", choices=FORMATS, default="json", help="default: %(default)s")
    return parser


def _clients(parser: argparse.ArgumentParser, options: argparse.Namespace) -> ClientPaths | None:
    if options.client_keys is not None:
        return ClientPaths(options.client_keys, options.client_limits, options.engine_keys)
    for flag in ("client_limits", "engine_keys"):
        if getattr(options, flag) is not None:
            parser.error(f"--{flag.replace('_', '-')}: requests need no key; set --client-keys, too")
    return None


def _credentials(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Credentials:
    if options.api_server is not None:
        return Credentials(options.api_server, options.token_file, options.ca_file)
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        parser.error("outside a pod, set --api-server, for example to the URL of `kubectl proxy`")
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Credentials(url, options.token_file or _ACCOUNT / "token", options.ca_file or _ACCOUNT / "ca.crt")
