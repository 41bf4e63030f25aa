"""FastGenDeployments as tests handle them: apply, watch conditions, talk to the Service."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from cluster.bed import Bed
from cluster.endpoint import service_url
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
            "resources": {"limits": {"memory": "2Gi"}},
            "drainSeconds": 5,
            **spec,
        },
    }


@dataclass
class Namespace:
    """One namespace of a bed, under the restricted Pod Security standard."""

    bed: Bed
    name: str

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

    def url(self, service: str) -> contextlib.AbstractContextManager[str]:
        """http://host:port of the Service, as this machine reaches it."""
        return service_url(self.bed, self.name, service)


def chat(url: str, question: str = "What is the capital of France?") -> str:
    """The greedy answer to one question, over the OpenAI client."""
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=3)
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0
    )
    return answer.choices[0].message.content or ""


def metric(url: str, name: str) -> float:
    """The value of the first sample whose name starts with `name`; KeyError if there is none."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    raise KeyError(name)
