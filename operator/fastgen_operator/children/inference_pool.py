"""The InferencePool of the serving pods, and the way to its endpoint picker, which runs in the gateway's pods.

A pool names a Service of its own namespace. So it gets one without a selector, and an EndpointSlice with the addresses
of the gateway's pods: see docs/decisions/079.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

from fastgen_operator.children.desired import Desired
from fastgen_operator.kinds import ENDPOINT_SLICE, INFERENCE_POOL, SERVICE, Kind, Object
from fastgen_operator.labels_and_annotations import (
    OPERATOR_NAME,
    PICKER_SUFFIX,
    SERVICE_NAME_LABEL,
    SLICE_MANAGER_LABEL,
)
from fastgen_operator.objects.container import HTTP_PORT

# Of the Service: the usual one of endpoint pickers.
_SERVICE_PORT: Final = 9002
# On which the gateway's pods listen for Gateways (`pools.yaml` of the gateway).
PICKER_PORT: Final = 9004
_PORT_NAME: Final = "grpc"


def build_inference_pool(desired: Desired) -> list[tuple[Kind, Object]]:
    """Build the picker's Service, the EndpointSlice with its addresses, if there are any, and the pool."""
    name, pickers = f"{desired.name}{PICKER_SUFFIX}", desired.platform.pickers
    ports = [{"name": _PORT_NAME, "port": _SERVICE_PORT, "protocol": "TCP"}]
    pool = {
        "selector": {"matchLabels": desired.selector},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "name": name,
            "port": {"number": _SERVICE_PORT},
            # Without the picker, the Gateway still routes, only less well.
            "failureMode": "FailOpen",
        },
    }
    return [
        (SERVICE, {"metadata": {"name": name}, "spec": {"ports": ports}}),
        *([(ENDPOINT_SLICE, _slice(name, pickers))] if pickers else []),
        (INFERENCE_POOL, {"spec": pool}),
    ]


def _slice(name: str, addresses: tuple[str, ...]) -> Object:
    labels = {SERVICE_NAME_LABEL: name, SLICE_MANAGER_LABEL: OPERATOR_NAME}
    return {
        "metadata": {"name": name, "labels": labels},
        "addressType": f"IPv{ip_address(addresses[0]).version}",
        "endpoints": [{"addresses": [each], "conditions": {"ready": True}} for each in addresses],
        "ports": [{"name": _PORT_NAME, "port": PICKER_PORT, "protocol": "TCP"}],
    }
