"""Envoy's bootstrap: `envoy.yaml`, optionally for InferencePools, with TLS for clients or with other ports."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

BOOTSTRAP: Final = Path(__file__).with_name("envoy.yaml")
# The listener for Gateways in front of InferencePools.
POOLS: Final = Path(__file__).with_name("pools.yaml")
# The folder of the picker's certificate in the chart's pods, as in `pools.yaml`.
POOLS_FOLDER: Final = "/etc/fastgen/pools"
# The listener before which that one is inserted. The chart does so, too.
_STATUS: Final = "  - name: status\n    address"
# Resource with the certificate of listener `front`. Envoy reloads it when the files change.
CERTIFICATE: Final = Path(__file__).with_name("certificate.yaml")
# Where the chart mounts the resource and the files of the certificate.
CERTIFICATE_PATH: Final = "/etc/envoy/certificate.yaml"
CERTIFICATE_FOLDER: Final = "/etc/fastgen/certificate"
# All of IPv6 and IPv4. The chart replaces this text, too.
_ANYWHERE: Final = 'address: "::", ipv4_compat: true'

_FRONT: Final = """\
    filter_chains:
    - filters:
"""
_FRONT_WITH_TLS: Final = f"""\
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            alpn_protocols: [http/1.1]
            tls_certificate_sds_secret_configs:
            - name: front
              sds_config:
                resource_api_version: V3
                path_config_source: {{path: {CERTIFICATE_PATH}}}
      filters:
"""


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a gateway pod; the defaults are those in `envoy.yaml`.

    Attributes:
        front: for clients.
        again: on the loopback interface: requests that passed while the picker was away.
        admin: Envoy's admin interface, on the loopback interface.
        status: Envoy's `/ready` and `/stats/prometheus`.
        picker: of the picker's gRPC server.
        pools: for Gateways in front of InferencePools.
    """

    front: int = 8080
    again: int = 8081
    admin: int = 9901
    status: int = 9902
    picker: int = 9002
    pools: int = 9004


def with_tls(text: str) -> str:
    """Return a bootstrap in which listener `front`, the first one, speaks TLS."""
    return text.replace(_FRONT, _FRONT_WITH_TLS, 1)


def with_pools(text: str) -> str:
    """Return a bootstrap with the listener for Gateways in front of InferencePools."""
    return text.replace(_STATUS, POOLS.read_text() + _STATUS, 1)


def bootstrap(ports: Ports, address: str | None = None, pools: Path | None = None) -> str:
    """Return Envoy's bootstrap for other ports, and for one address instead of all of IPv6 and IPv4.

    Args:
        ports: instead of those in `envoy.yaml`.
        address: on which Envoy listens; None for all.
        pools: folder with the certificate of the listener for Gateways; None for no such listener.
    """
    changed = {getattr(Ports(), field.name): getattr(ports, field.name) for field in fields(Ports)}
    text = BOOTSTRAP.read_text()
    if pools is not None:
        text = with_pools(text).replace(POOLS_FOLDER, str(pools))
    if address is not None:
        text = text.replace(_ANYWHERE, f'address: "{address}"')
    return re.sub(r"(?<=port_value: )\d+", lambda found: str(changed[int(found[0])]), text)
