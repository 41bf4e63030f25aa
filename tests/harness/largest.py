"""FastGenDeployments of the largest size that admission accepts."""

from __future__ import annotations

import base64
import json
import uuid
from typing import Any

import httpx

from fastgen_operator.kinds import FASTGEN
from harness.space import resource
from support.namespace import Namespace, Object


def small_maps() -> Object:
    """Return a pod spec of the most maps that admission accepts: they take the most memory for their text."""
    return {f"m{part}": {f"k{number:03}": {"a": 1} for number in range(186)} for part in range(21)}


def variables() -> Object:
    """Return a pod spec of about the most environment variables that admission accepts, in one container each 900."""
    values = [[{"name": f"v{part}{number:03}"} for number in range(900)] for part in range(3)]
    containers = [{"name": f"c{part}", "image": "x", "env": env} for part, env in enumerate(values)]
    return {"containers": containers}


def store_largest(space: Namespace[Any], etcd: int, count: int) -> None:
    """Store that many of the largest resources, by etcd's port on this machine."""
    for shape, (pod_spec, copies) in enumerate([(small_maps(), count * 9 // 10), (variables(), count // 10)]):
        first, *others = [f"large-{shape}-{number}" for number in range(copies)]
        body = resource(first, replicas=0, podTemplate={"spec": pod_spec})
        body["metadata"]["annotations"] = {f"example.com/{number}": "x" * 40_000 for number in range(6)}
        space.server.request("POST", FASTGEN.path(space.name), body=body, content_type="application/json")
        _store_copies(space, etcd, first, others)


def _store_copies(space: Namespace[Any], etcd_port: int, name: str, copies: list[str]) -> None:
    """Store copies of a resource straight in etcd: the API server takes half a second of a core to admit each."""
    folder = f"/registry/{FASTGEN.group}/{FASTGEN.plural}/{space.name}/"
    with httpx.Client(base_url=f"http://127.0.0.1:{etcd_port}/v3/kv/", timeout=60) as etcd:

        def request(action: str, **fields: bytes) -> Object:
            body = {field: base64.b64encode(value).decode() for field, value in fields.items()}
            answer: Object = etcd.post(action, json=body).raise_for_status().json()
            return answer

        (stored,) = request("range", key=f"{folder}{name}".encode())["kvs"]
        value = json.loads(base64.b64decode(stored["value"]))
        for copy in copies:
            value["metadata"] |= {"name": copy, "uid": str(uuid.uuid4())}
            request("put", key=f"{folder}{copy}".encode(), value=json.dumps(value).encode())
