"""FastGenDeployments as tests handle them: apply, watch conditions, talk to the Service."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import OpenAI

from cluster.bed import Bed
from support.waiting import eventually

MODEL = "file:///models/SmolLM2-135M-Instruct.Q4_1.gguf"

Object = dict[str, Any]


def manifest(name: str, **spec: Any) -> Object:
    """A FastGenDeployment of the demo model; keywords override parts of its spec."""
    return {
        "apiVersion": "fastgen.dev/v1alpha1",
        "kind": "FastGenDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": MODEL, "servedName": "smollm2"},
            "engine": {"device": "cpu", "tokenBudget": 128, "maxModelLength": 2048},
            "drainSeconds": 5,
            **spec,
        },
    }


@dataclass
class Namespace:
    """One namespace of a bed, under the restricted Pod Security standard."""

    bed: Bed
    name: str
    forwards: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.bed.kubectl("--namespace", self.name, *args, stdin=stdin)

    def get(self, *what: str) -> Object:
        answer: Object = json.loads(self.kubectl("get", *what, "--output", "json"))
        return answer

    def items(self, *what: str) -> list[Object]:
        items: list[Object] = self.get(*what)["items"]
        return items

    def apply(self, obj: Object) -> None:
        self.kubectl("apply", "--filename", "-", stdin=json.dumps(obj))

    def pods(self, deployment: str) -> list[Object]:
        return self.items("pods", "--selector", f"fastgen.dev/deployment={deployment}")

    def condition(self, deployment: str, type_: str) -> Object:
        """The condition, or {} while there is none for the current generation."""
        obj = self.get("fgd", deployment)
        for condition in obj.get("status", {}).get("conditions", []):
            if condition["type"] == type_ and condition["observedGeneration"] == obj["metadata"]["generation"]:
                found: Object = condition
                return found
        return {}

    def wait_condition(self, deployment: str, type_: str, status: str, *, within: float = 120) -> Object:
        def look() -> Object | None:
            condition = self.condition(deployment, type_)
            return condition if condition.get("status") == status else None

        found = eventually(look, within=within, what=f"{type_}={status} of {deployment}")
        assert found is not None
        return found

    @contextlib.contextmanager
    def address(self, service: str) -> Iterator[str]:
        """host:port of the Service as this machine reaches it: its ClusterIP where that is routed, else a forward."""
        if self.bed.kind == "native":
            yield f"{self.get('service', service)['spec']['clusterIP']}:8000"
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            str(self.bed.programs / "kubectl"),
            "--kubeconfig",
            str(self.bed.kubeconfig),
            "--namespace",
            self.name,
        ]
        forward = subprocess.Popen([*command, "port-forward", f"service/{service}", f"{port}:8000"])
        try:
            eventually(
                lambda: httpx.get(f"http://127.0.0.1:{port}/health").status_code,
                within=30,
                what=f"the forward to {service}",
            )
            yield f"127.0.0.1:{port}"
        finally:
            forward.terminate()
            forward.wait(10)


def chat(address: str, question: str = "What is the capital of France?") -> str:
    """The greedy answer to one question, over the OpenAI client."""
    client = OpenAI(base_url=f"http://{address}/v1", api_key="unused", max_retries=3)
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0
    )
    return answer.choices[0].message.content or ""


def metric(address: str, name: str) -> float:
    """The value of the first sample whose name starts with `name`; KeyError if there is none."""
    for line in httpx.get(f"http://{address}/metrics").text.splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    raise KeyError(name)
