"""A fleet of real engines and the real operator, scraped by a real Prometheus, on a control plane without nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from dashboards.picture import Runner, Series, Span
from dashboards.queries import fill
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.objects.container import HTTP_PORT
from harness.chart import SYSTEM
from harness.process import OperatorProcess
from harness.prometheus import Prometheus, Target
from harness.space import Space, resource, running
from support.namespace import Object

# What the operator applies for a model that is downloaded to a volume.
CACHED = resource("cached", model={"source": "hf://example/model"}, cache={"size": "1Gi"})


def runner(source: Prometheus, variables: Mapping[str, str], span: Span) -> Runner:
    """Return what evaluates the queries of a picture, with the values of the dashboard's variables."""

    def run(expression: str) -> list[Series]:
        found = source.between(fill(expression, variables), span.start, span.end, span.step)
        return [Series(each["metric"], [(at, float(value)) for at, value in each["values"]]) for each in found]

    return run


def scaled(minimum: int, maximum: int = 3, **spec: object) -> Object:
    """Return the resource `chat` with autoscaling."""
    return resource("chat", autoscaling={"minReplicas": minimum, "maxReplicas": maximum}, **spec)


@dataclass
class MonitoredFleet:
    """The pods of the resource `chat` in a namespace. Each has an address of its own for an engine to listen on.

    Attributes:
        addresses: IPv4 addresses of the loopback network, for as many pods at a time.
        start_seconds: until a pod is ready, from its first `admit`.
    """

    space: Space
    operator: OperatorProcess
    source: Prometheus
    addresses: Sequence[str]
    start_seconds: float = 0.0
    _seen: dict[str, float] = field(default_factory=dict)

    def admit(self) -> list[str]:
        """Let each new pod be ready at a free address, as a kubelet would. Scrape all; return the used addresses."""
        live = [pod for pod in self.space.pods("chat") if "deletionTimestamp" not in pod["metadata"]]
        used = {pod["metadata"]["name"]: pod["status"].get("podIP") for pod in live}
        for name, address in used.items():
            free = [each for each in self.addresses if each not in used.values()]
            since = time.monotonic() - self._seen.setdefault(name, time.monotonic())
            if address is None and free and since >= self.start_seconds:
                status = {**running(ready=True), "podIP": free[0], "podIPs": [{"ip": free[0]}]}
                with suppress(KubeError):  # deleted since it was listed
                    self.space.patch(f"pod/{name}", {"status": status}, "status")
                    used[name] = free[0]
        self.source.scrape([*self._engines(used), self._operator()])
        return [address for address in used.values() if address is not None]

    def _engines(self, used: dict[str, str | None]) -> list[Target]:
        """Return the engines with the labels that the operator's PodMonitors add."""
        labels = {"namespace": self.space.name, "fastgen_dev_deployment": "chat"}
        return [
            Target(f"{address}:{HTTP_PORT}", {**labels, "pod": pod})
            for pod, address in used.items()
            if address is not None
        ]

    def _operator(self) -> Target:
        labels = {"namespace": SYSTEM, "pod": "fastgen-operator-0"}
        return Target(f"127.0.0.1:{self.operator.metrics_port}", labels, honour=True)
