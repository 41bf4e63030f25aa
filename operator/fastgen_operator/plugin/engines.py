"""The engines of a FastGenDeployment's pods, each reached through a port-forward of its own."""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fastgen.api_client.metrics import Scrape
from fastgen_operator.children.metadata import HTTP_PORT
from fastgen_operator.kinds import Object
from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.pods import is_ready, name_of

# Metrics of one pod arrive within this time, or it is shown without figures.
_SECONDS: Final = 5.0
_AT_ONCE: Final = 16


def serving(pods: Sequence[Object]) -> list[Object]:
    """Return the pods whose engine may answer: those that are ready, also while they drain."""
    return [pod for pod in pods if is_ready(pod)]


class MetricsReader:
    """Reads the metrics of pods. Connections are kept for the next time, and replaced if they fail."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._connections: dict[str, http.client.HTTPConnection] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="metrics")

    def read(self, pods: Sequence[Object]) -> dict[str, Scrape | PluginError]:
        """Return the metrics of each pod, or why there are none, by name."""
        names = [name_of(pod) for pod in pods]
        for gone in self._connections.keys() - {*names}:
            self._connections.pop(gone).close()
        return dict(zip(names, self._threads.map(self._read, pods), strict=True))

    def _read(self, pod: Object) -> Scrape | PluginError:
        name = name_of(pod)
        for attempt in ("kept", "new"):
            connection = self._connections.pop(name, None)
            if connection is None and attempt == "kept":
                continue
            try:
                if connection is None:
                    connection = self._cluster.connection(pod["metadata"]["namespace"], name, HTTP_PORT, _SECONDS)
                text = get(connection, "/metrics")
                self._connections[name] = connection
                return Scrape.parse(text, time.monotonic())
            except PluginError as error:
                return error
            except (OSError, http.client.HTTPException) as error:
                if connection is not None:
                    connection.close()
                failure = PluginError(f"pod {name} does not answer: {error or type(error).__name__}")
        return failure


def get(connection: http.client.HTTPConnection, path: str) -> str:
    """Return the body of a GET as text.

    Raises:
        PluginError: the status is not 200.
        OSError, HTTPException: the connection failed.
    """
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read().decode(errors="replace")
    if answer.status != 200:
        raise PluginError(f"GET {path}: {answer.status} {answer.reason}: {' '.join(body.split())[:200]}")
    return body
