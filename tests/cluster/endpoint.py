"""The address at which this machine reaches a Service of the cluster."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.bed import Bed

PORT = 8000


@contextmanager
def service_url(bed: Bed, namespace: str, name: str, port: int = PORT) -> Iterator[str]:
    """Yield http://ADDRESS:PORT of the Service.

    On a native bed this machine is the node, so the Service's cluster IP works. Otherwise kubectl forwards a free port
    for the duration of the context. Raises CommandError if there is no such Service, RuntimeError if forwarding fails.
    """
    address = bed.kubectl("-n", namespace, "get", "service", name, "-o=jsonpath={.spec.clusterIP}")
    if bed.kind == "native":
        yield f"http://{address}:{port}"
        return
    command = [str(bed.programs / "kubectl"), f"--kubeconfig={bed.kubeconfig}", "-n", namespace]
    forward = subprocess.Popen(
        [*command, "port-forward", "--address=127.0.0.1", f"service/{name}", f":{port}"],
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
