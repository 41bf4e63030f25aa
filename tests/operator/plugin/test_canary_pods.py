"""`kubectl fastgen logs` and `top` show the pods of a canary, and mark them. Needs no cluster."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any, cast

import pytest
from kubernetes.client import Configuration

from fastgen_operator.kube.transport import ApiServer
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.plugin.commands import logs, top
from fastgen_operator.plugin.screen import Screen


def engine_pod(name: str, owner: str, created: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "prod", "creationTimestamp": created}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {**metadata, "labels": {"fastgen.dev/deployment": owner}}, "spec": {}, "status": ready}


PODS = [
    engine_pod("chat-canary-1", "chat_canary", "2026-01-01T00:00:00Z"),
    engine_pod("chat-2", "chat", "2026-01-02T00:00:00Z"),
    engine_pod("chat-1", "chat", "2026-01-01T00:00:00Z"),
    # A resource of this name, and a download.
    engine_pod("other", "chat-canary", "2026-01-01T00:00:00Z"),
    engine_pod("fetch", "chat_fetch", "2026-01-01T00:00:00Z"),
]


class _Server:
    """Lists the pods whose owner a selector names."""

    def request(self, _: str, path: str, query: Sequence[tuple[str, str]], *__: object) -> Any:
        if "pods" not in path:
            return {}
        ((_, selector),) = query
        match = re.fullmatch(r"fastgen\.dev/deployment in \((.+)\)", selector)
        names = match[1].split(",") if match else [selector.partition("=")[2]]
        return {"items": [pod for pod in PODS if pod["metadata"]["labels"]["fastgen.dev/deployment"] in names]}


class _Cluster(Cluster):
    def log(self, pod: Pod, _: object) -> Iterator[str]:
        yield f"line of {pod.name}"

    def connection(self, *_: object) -> Any:
        raise PluginError("no port-forward")


@pytest.fixture
def cluster() -> Cluster:
    return _Cluster(Configuration(), "here", "prod", cast(ApiServer, _Server()))


def test_the_pods_of_a_canary_come_last(cluster: Cluster) -> None:
    assert [pod.name for pod in cluster.pods_and_canary("chat")] == ["chat-1", "chat-2", "chat-canary-1"]
    assert [pod.name for pod in cluster.pods("chat")] == ["chat-1", "chat-2"]


def test_the_logs_of_a_canary_are_shown_and_marked(cluster: Cluster) -> None:
    parser, stream = argparse.ArgumentParser(), StringIO()
    logs.add_arguments(parser)
    assert logs.run(parser.parse_args(["chat"]), cluster, Screen(stream, {})) == 0
    assert stream.getvalue().splitlines() == [
        "[chat-1] line of chat-1",
        "[chat-2] line of chat-2",
        "[chat-canary-1 canary] line of chat-canary-1",
    ]


def test_top_shows_and_marks_the_pods_of_a_canary(cluster: Cluster) -> None:
    pods = cluster.pods_and_canary("chat")
    found = dict.fromkeys((pod.name for pod in pods), "no answer")
    lines = top.view("prod/chat", pods, found, None, Screen(StringIO(), {}))
    rows = [line.split("   ")[0].rstrip() for line in lines if line.startswith("chat-")]
    names = ["chat-1", "chat-2", "chat-canary-1 canary"]
    assert rows == names + [f"{name}: no answer" for name in names]
    shown = top._to_json(pods, found, None)["pods"]
    assert {name: each["canary"] for name, each in shown.items()} == {
        "chat-1": False,
        "chat-2": False,
        "chat-canary-1": True,
    }
