"""Helpers for FastGenDeployments that serve: manifests, service URLs, chat, metrics."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
from openai import OpenAI

from cluster.bed import Bed
from cluster.endpoint import service_url
from support.namespace import Namespace, Object

MODEL = "file:///models/SmolLM2-135M-Instruct.Q4_1.gguf"


def manifest(name: str, **spec: Any) -> Object:
    """Return a FastGenDeployment of the demo model; keywords override fields of its spec."""
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


class ServedNamespace(Namespace[Bed]):
    """A namespace of a cluster whose pods really run."""

    patience = 180

    def url(self, service: str) -> contextlib.AbstractContextManager[str]:
        """Yield a URL of the Service that this machine can reach."""
        return service_url(self.cluster, self.name, service)


def chat(url: str, question: str = "What is the capital of Germany?") -> str:
    """Ask one question with the OpenAI client and return the greedy answer."""
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=3)
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0
    )
    return answer.choices[0].message.content or ""


def metric(url: str, name: str) -> float:
    """Return the first sample whose name starts with `name`; raise KeyError if there is none."""
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    raise KeyError(name)
