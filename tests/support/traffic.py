"""Continuous streaming requests from inside the cluster, and their results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.deployments import ServedNamespace
from support.waiting import eventually

CLIENT = Path(__file__).with_name("streaming_client.py")


@dataclass(frozen=True)
class Traffic:
    """Requests of one client pod to one Service."""

    namespace: ServedNamespace
    pod: str

    def lines(self) -> list[str]:
        """Return one line for each request that has ended."""
        return self.namespace.kubectl("logs", self.pod).splitlines()

    def failures(self) -> list[str]:
        return [line for line in self.lines() if not line.startswith("ok ")]

    def flows_on(self, count: int = 3) -> None:
        """Wait until `count` more requests have ended."""
        self.wait_for(len(self.lines()) + count)

    def wait_for(self, count: int) -> None:
        """Wait until `count` requests have ended since the start."""
        eventually(lambda: len(self.lines()) >= count, within=60, what=f"{count} requests", every=0.5)

    def send_no_more(self) -> None:
        """Let the clients end after their open streams."""
        self.namespace.kubectl("exec", self.pod, "--", "touch", "/tmp/stop")

    def stop(self) -> None:
        """Stop the clients and wait for their open streams to end."""
        self.send_no_more()
        self.wait_ended()

    def wait_ended(self) -> None:
        """Wait for the end of clients that send no more."""

        def ended() -> bool:
            return str(self.namespace.get("pod", self.pod)["status"]["phase"]) == "Succeeded"

        eventually(ended, within=300, what="the end of the last streams", every=0.5)


@contextmanager
def traffic(
    namespace: ServedNamespace, image: str, service: str, model: str, *, clients: int, seconds: int
) -> Iterator[Traffic]:
    """Run clients whose streams take about `seconds` each (0: briefly); yield after a first round of short streams."""
    pod_name = f"client-{seconds}"
    options = [f"{service}.{namespace.name}.svc", "8000", model, str(clients), str(seconds)]
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "client",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", CLIENT.read_text(), *options],
        "securityContext": restricted,
        # Without a request, the engines of the node would leave the client hardly any processor time.
        "resources": {"requests": {"cpu": "100m"}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod_name},
        "spec": {"containers": [container], "restartPolicy": "Never", "automountServiceAccountToken": False},
    }
    namespace.kubectl("create", "--filename", "-", stdin=json.dumps(pod))
    namespace.kubectl("wait", "--for=condition=Ready", f"pod/{pod_name}", "--timeout=600s")
    stream = Traffic(namespace, pod_name)
    stream.wait_for(clients)
    try:
        yield stream
    finally:
        namespace.kubectl("delete", "pod", pod_name, "--wait=false", "--grace-period=1")
