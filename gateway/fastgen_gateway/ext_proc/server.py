"""The gRPC server of the picker, with the settings without which it loses requests; see docs/decisions/056."""

from __future__ import annotations

from typing import Final

import grpc
from envoy.service.accesslog.v3.als_pb2_grpc import add_AccessLogServiceServicer_to_server
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from fastgen_gateway.ext_proc.access_log import AccessLog
from fastgen_gateway.ext_proc.picker import Picker

# Larger than Envoy's buffer (`envoy.yaml`), so that each body that Envoy accepts arrives.
_MOST_BYTES: Final = 18 << 20
# More than connections to Envoy. The default of 1,000 pending requests fails in bursts.
_MOST_PENDING: Final = 100_000
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MOST_BYTES),
    # Two pickers on one port would each get some of the connections.
    ("grpc.so_reuseport", 0),
    # Envoy's pings are allowed, whatever their number: otherwise the connection is closed, with all held requests.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server.max_pending_requests", _MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
)
# The empty name is that of the whole server; the last two are those of the endpoint picker protocol.
_SERVICES: Final = ("", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness", "readiness")


async def start_server(picker: Picker, address: str, port: int) -> grpc.aio.Server:
    """Start the server of a picker, and of gRPC's health protocol. Raises OSError if it cannot listen there."""
    server = grpc.aio.server(options=_OPTIONS)
    add_ExternalProcessorServicer_to_server(picker, server)
    add_AccessLogServiceServicer_to_server(AccessLog(picker.access.limits, picker.metrics), server)
    health = HealthServicer()
    add_HealthServicer_to_server(health, server)
    for service in _SERVICES:
        await health.set(service, HealthCheckResponse.SERVING)
    host = f"[{address}]" if ":" in address else address
    try:
        server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(0, str(error)) from error
    await server.start()
    return server
