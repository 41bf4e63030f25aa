"""The InferencePool: the engines as a backend of the Gateway API inference extension."""

from __future__ import annotations

from typing import Final

from fastgen_operator.children.metadata import HTTP_PORT, child, selector
from fastgen_operator.kinds import INFERENCE_POOL, Object

# The name and port that the extension's own chart gives the endpoint picker of a pool.
PICKER_SUFFIX: Final = "-epp"
PICKER_PORT: Final = 9002


def build_inference_pool(owner: Object) -> Object:
    """The pool of the serving pods, with the Service NAME-epp as its endpoint picker."""
    name = owner["metadata"]["name"]
    spec = {
        "selector": {"matchLabels": selector(name)},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "name": f"{name}{PICKER_SUFFIX}",
            "port": {"number": PICKER_PORT},
            # A picker that is away costs good choices, not the service.
            "failureMode": "FailOpen",
        },
    }
    return child(INFERENCE_POOL, owner, spec)
