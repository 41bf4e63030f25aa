"""The address at which this machine reaches a Service of the cluster."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.bed import Bed
from cluster.waiting import wait_for

PORT = 8000


@contextmanager
def service_url(bed: Bed, namespace: str, name: str, port: int = PORT) -> Iterator[str]:
    """Yield http://ADDRESS:PORT of the Service.

    On a native bed this machine is the node, so the Service's cluster IP works. Otherwise kubectl forwards a free port
    to one ready pod for the duration of the context.

    Raises CommandError if there is no such Service, TimeoutError if it has no ready pod, RuntimeError if forwarding
    fails.
    """
    spec = json.loads(bed.kubectl("-n", namespace, "get", "service", name, "-o=json"))["spec"]
    address = spec["clusterIP"]
    if bed.kind == "native":
        yield f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        return
    port_name = next(each.get("name") for each in spec["ports"] if each["port"] == port)
    pod, pod_port = wait_for(
        f"a ready pod of service {name}", lambda: _ready_pod(bed, namespace, name, port_name), seconds=30, every=0.3
    )
    command = [str(bed.programs / "kubectl"), f"--kubeconfig={bed.kubeconfig}", "-n", namespace]
    forward = subprocess.Popen(
        [*command, "port-forward", "--address=127.0.0.1", f"pod/{pod}", f":{pod_port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        line = forward.stdout.readline() if forward.stdout else ""
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        if found is None:
            raise RuntimeError(f"service {name}: port forwarding failed: {line.strip()}")
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        forward.terminate()
        forward.wait()


def _ready_pod(bed: Bed, namespace: str, service: str, port_name: str | None) -> tuple[str, int] | None:
    """Return a ready pod of the Service and its port with that name.

    For a Service, `kubectl port-forward` may choose one that is being deleted.
    """
    selector = f"kubernetes.io/service-name={service}"
    slices = json.loads(bed.kubectl("-n", namespace, "get", "endpointslices", "-l", selector, "-o=json"))["items"]
    for each in slices:
        ports = [port["port"] for port in each.get("ports") or () if (port.get("name") or None) == port_name]
        for endpoint in each.get("endpoints") or ():
            if ports and endpoint["conditions"].get("ready"):
                return str(endpoint["targetRef"]["name"]), int(ports[0])
    return None
