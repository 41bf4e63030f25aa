"""A Gateway in front of an InferencePool, as implementations of the Gateway API set up their Envoy."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
import yaml

from cluster.controlplane import free_ports
from gateway.gateway_pod import CLIENT_SECONDS, ENVOY
from support.waiting import PATIENCE, wait_until

# The Gateway passes the value of this request header to the picker as the subset hint.
SUBSET_HEADER = "x-test-subset"
_TYPES = "type.googleapis.com/envoy.extensions"
_STREAMED = "FULL_DUPLEX_STREAMED"
_ROUTE = {
    "cluster": "pool",
    "timeout": "0s",
    "retry_policy": {"retry_on": "connect-failure", "num_retries": 3},
}
_TLS = {
    "name": "envoy.transport_sockets.tls",
    # It verifies no certificate.
    "typed_config": {"@type": f"{_TYPES}.transport_sockets.tls.v3.UpstreamTlsContext", "common_tls_context": {}},
}


class PoolGateway:
    """The real Envoy with an ext_proc filter that calls a picker.

    Args:
        folder: for its log and configuration.
        picker_port: of the gateway pod.
        replicas: addresses of the pool's replicas.
        authority: the name under which it calls the picker.
        tls: whether it calls it with TLS.
        fails_open: the pool's failureMode.
        by_header: whether it sends requests where the header says, to any address, instead of to one of the replicas.
        request_mode: how it sends bodies of requests.
    """

    def __init__(
        self,
        folder: Path,
        picker_port: int,
        replicas: Sequence[str],
        authority: str = "m-picker.default.svc:9002",
        *,
        tls: bool = True,
        fails_open: bool = True,
        by_header: bool = False,
        request_mode: str = _STREAMED,
    ) -> None:
        self.folder = folder
        self.port, self._admin = free_ports(2)
        pool = _by_header() if by_header else _with_override(replicas)
        picker = _cluster("picker", [f"127.0.0.1:{picker_port}"]) | _http2()
        self._config = {
            "admin": {"address": _address(f"127.0.0.1:{self._admin}")},
            "static_resources": {
                "listeners": [_listener(self.port, _filters(authority, fails_open, request_mode))],
                "clusters": [pool, picker | ({"transport_socket": _TLS} if tls else {})],
            },
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PoolGateway:
        config = self.folder / "pool-gateway.yaml"
        config.write_text(yaml.safe_dump(self._config))
        command = [
            str(ENVOY),
            "-c",
            str(config),
            "--log-level",
            "warning",
            "--concurrency",
            "1",
            "--use-dynamic-base-id",
        ]
        with (self.folder / "pool-gateway.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._is_ready, "the Gateway's Envoy is ready", PATIENCE * 20)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(PATIENCE * 20)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "pool-gateway.log").read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{self._admin}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, body: object, path: str = "/v1/completions", subset: str | None = None) -> httpx.Response:
        """Send a body, as it is if it is bytes or pieces of them."""
        content = {"json": body} if isinstance(body, dict) else {"content": body}
        headers = {} if subset is None else {SUBSET_HEADER: subset}
        return httpx.post(f"{self.url}{path}", timeout=CLIENT_SECONDS, headers=headers, **content)  # type: ignore[arg-type]


def _listener(port: int, filters: list[object]) -> object:
    route = {
        "name": "pool",
        "virtual_hosts": [
            {
                "name": "all",
                "domains": ["*"],
                "routes": [{"match": {"prefix": "/"}, "route": _ROUTE}],
            }
        ],
    }
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "pool",
        "http_filters": filters,
        "route_config": route,
    }
    return {
        "name": "pool",
        "address": _address(f"127.0.0.1:{port}"),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _filters(authority: str, fails_open: bool, request_mode: str) -> list[object]:
    hint = {
        "header": SUBSET_HEADER,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
    }
    picker = {
        "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker", "authority": authority}, "timeout": "0s"},
        "failure_mode_allow": fails_open,
        "message_timeout": f"{PATIENCE * 30:g}s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": request_mode,
            "request_trailer_mode": "SEND" if request_mode == _STREAMED else "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": _STREAMED,
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    return [
        {
            "name": "envoy.filters.http.header_to_metadata",
            "typed_config": {
                "@type": f"{_TYPES}.filters.http.header_to_metadata.v3.Config",
                "request_rules": [hint],
            },
        },
        {"name": "envoy.filters.http.ext_proc", "typed_config": picker},
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
        },
    ]


def _with_override(replicas: Sequence[str]) -> dict[str, object]:
    """Return a cluster of the replicas that follows the picker, and balances by itself without it."""
    override = {
        "@type": f"{_TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
        ],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]},
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {"@type": f"{_TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    policy = {
        "typed_extension_config": {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    }
    return _cluster("pool", replicas) | {"load_balancing_policy": {"policies": [policy]}}


def _by_header() -> dict[str, object]:
    return {
        "name": "pool",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
    }


def _cluster(name: str, addresses: Sequence[str]) -> dict[str, object]:
    endpoints = [{"endpoint": {"address": _address(address)}} for address in addresses]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "load_assignment": assignment}


def _http2() -> dict[str, object]:
    options = {
        "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "typed_extension_protocol_options": {
            f"{_TYPES.partition('/')[2]}.upstreams.http.v3.HttpProtocolOptions": options
        }
    }


def _address(text: str) -> object:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
