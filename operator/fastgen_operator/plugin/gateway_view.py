"""Ask the pods of the gateway about a FastGenDeployment, through port-forwards."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from fastgen_operator.autoscale.scrape.gateways import GATEWAY_PORT, demand_path
from fastgen_operator.kinds import Key
from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.runtime.discovery import GATEWAY_SELECTOR

_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class GatewayView:
    """What one pod of the gateway knows.

    Attributes:
        pod: its name.
        ready: replicas to which it sends requests.
        running: requests that it has sent and that have not ended.
        held: requests that wait for a replica.
        oldest_held_seconds: for how long the oldest of them has waited.
        problem: why the other fields are unknown; empty if they are known.
    """

    pod: str
    ready: int = 0
    running: int = 0
    held: int = 0
    oldest_held_seconds: float = 0.0
    problem: str = ""


def gateway_views(cluster: Cluster, namespace: str, deployment: Key) -> list[GatewayView]:
    """Return what each running pod of the gateway knows of a deployment.

    Args:
        cluster: the cluster.
        namespace: of the gateway.
        deployment: namespace and name.

    Raises:
        PluginError: the pods cannot be listed.
    """
    pods = [pod for pod in cluster.pods_with(namespace, GATEWAY_SELECTOR) if pod.phase == "Running"]
    return [_view(cluster, namespace, pod.name, "/".join(deployment)) for pod in pods]


def summary(views: list[GatewayView]) -> Iterator[str]:
    """Yield the lines about the gateway: its totals, and each pod without an answer."""
    known = [view for view in views if not view.problem]
    if known:
        running, held = sum(view.running for view in known), sum(view.held for view in known)
        waited = f" for up to {max(view.oldest_held_seconds for view in known):.0f} s" if held else ""
        ready = min(view.ready for view in known)
        yield f"ready replicas: {ready}, running requests: {running}, held: {held}{waited}; gateway pods: {len(known)}"
    for view in views:
        if view.problem:
            yield f"pod {view.pod}: {view.problem}"
    if not views:
        yield "no pod runs"


def _view(cluster: Cluster, namespace: str, pod: str, name: str) -> GatewayView:
    try:
        with closing(cluster.connection(namespace, pod, GATEWAY_PORT, _SECONDS)) as connection:
            path, found = "/demand", None
            while found is None and path:
                connection.request("GET", path)
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    return GatewayView(pod, problem=f"GET /demand: {answer.status} {answer.reason}")
                page = json.loads(body)
                found = page["deployments"].get(name)
                path = f"/{demand_path(page['next'])}" if "next" in page else ""
        if found is None:
            return GatewayView(pod, problem="it does not know the resource")
        ready, running, held = (int(found[field]) for field in ("readyReplicas", "running", "held"))
        return GatewayView(pod, ready, running, held, float(found["oldestHeldSeconds"]))
    except PluginError as error:
        return GatewayView(pod, problem=str(error))
    except (OSError, http.client.HTTPException) as error:
        return GatewayView(pod, problem=f"it does not answer: {error or type(error).__name__}")
    except (ValueError, TypeError, KeyError, AttributeError):
        return GatewayView(pod, problem="GET /demand: the response is not that of this version's gateway")
