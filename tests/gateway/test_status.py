"""What `kubectl fastgen status` shows of a real gateway."""

from __future__ import annotations

import http.client
from typing import Any

from fastgen_gateway.routing.router import DEMAND_PAGE
from fastgen_operator.autoscale.scrape.gateways import GATEWAY_PORT
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import PluginError
from fastgen_operator.plugin.gateway_view import GatewayView, gateway_views, summary
from fastgen_operator.runtime.discovery import GATEWAY_SELECTOR
from gateway.gateway_pod import GatewayPod, expose
from gateway.held_clients import HeldClients
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import PATIENCE, wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]
KEY = ("default", "m")


class PlayedCluster:
    """A cluster with gateway pods, and port-forwards that lead to local ports.

    Args:
        ports: by name of the pod; None for one that rejects forwards.
    """

    def __init__(self, **ports: int | None) -> None:
        self._ports = ports

    def pods_with(self, namespace: str, selector: str) -> list[Pod]:
        assert (namespace, selector) == ("system", GATEWAY_SELECTOR)
        status = {"phase": "Running"}
        return [Pod({"metadata": {"name": name, "namespace": namespace}, "status": status}) for name in self._ports]

    def connection(self, namespace: str, pod: str, port: int, seconds: float) -> http.client.HTTPConnection:
        assert (namespace, port) == ("system", GATEWAY_PORT)
        local = self._ports[pod]
        if local is None:
            raise PluginError(f"forwarding port {port} of pod {namespace}/{pod}: forbidden")
        return http.client.HTTPConnection("127.0.0.1", local, timeout=PATIENCE * seconds)


def views(**ports: int | None) -> list[GatewayView]:
    cluster: Any = PlayedCluster(**ports)
    return gateway_views(cluster, "system", KEY)


def test_held_and_running_requests_and_ready_replicas_are_shown(
    pod: GatewayPod, api: ApiServerStandIn, replicas: Pair
) -> None:
    expose(api, pod, "m")
    HeldClients(pod.ports.front, 3, {"model": "m", "seconds": 600})
    wait_until(lambda: views(one=pod.http_port)[0].held == 3, "the requests are held")
    (line,) = summary(views(one=pod.http_port, two=pod.http_port))
    assert line.startswith("ready replicas: 0, running requests: 0, held: 6 for up to ")
    assert line.endswith(" s; gateway pods: 2")
    api.endpoints("m", replicas[0].address)
    wait_until(lambda: views(one=pod.http_port)[0].running == 3, "the requests run")
    (line,) = summary(views(one=pod.http_port))
    assert line == "ready replicas: 1, running requests: 3, held: 0; gateway pods: 1"


def test_one_of_many_resources_is_found(pod: GatewayPod, api: ApiServerStandIn, replicas: Pair) -> None:
    """The pod's answer has pages."""
    for number in range(DEMAND_PAGE):
        api.deployment(f"a{number}")
    expose(api, pod, "m", replicas[0])
    assert "default/m" not in pod.demand()["deployments"]
    (line,) = summary(views(one=pod.http_port))
    assert line == "ready replicas: 1, running requests: 0, held: 0; gateway pods: 1"


def test_a_pod_that_does_not_answer_is_named(pod: GatewayPod, replicas: Pair) -> None:
    replicas[0].stop()
    closed = int(replicas[0].address.rpartition(":")[2])
    found = list(summary(views(new=pod.http_port, closed=closed, forbidden=None, other=pod.ports.front)))
    assert found == [
        "pod new: it does not know the resource",
        "pod closed: it does not answer: [Errno 111] Connection refused",
        "pod forbidden: forwarding port 9003 of pod system/forbidden: forbidden",
        "pod other: GET /demand: 404 Not Found",
    ]
    assert list(summary(views())) == ["no pod runs"]
