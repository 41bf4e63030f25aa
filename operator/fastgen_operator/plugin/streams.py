"""A load of streams on the pods of a FastGenDeployment, and the outcome of each request."""

from __future__ import annotations

import http.client
import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.pods import HTTP_PORT, Pod

POLL_SECONDS: Final = 0.5
# A stream is lost if it has no data for this long.
SILENCE_SECONDS: Final = 60.0
# Pause between two requests of a worker.
_PAUSE_SECONDS: Final = 0.1
_PATH: Final = "/v1/completions"

# Refused: rejected before the first token by a pod that drains or is full. A client would try another pod.
Outcome = Literal["complete", "refused", "lost"]


@dataclass(frozen=True, slots=True)
class Result:
    """One request: its pod, its outcome and its duration."""

    pod: str
    outcome: Outcome
    seconds: float
    message: str = ""


@dataclass
class Load:
    """Workers that stream completions from the pods of a FastGenDeployment. Thread-safe."""

    cluster: Cluster
    name: str
    body: dict[str, Any]
    headers: dict[str, str]
    results: list[Result] = field(default_factory=list)
    _pods: list[Pod] = field(default_factory=list)
    _listed_at: float = -math.inf
    _listing: threading.Lock = field(default_factory=threading.Lock)
    _open: Counter[str] = field(default_factory=Counter)
    _turns: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def pods(self) -> list[Pod]:
        """Return the pods, which are listed at most twice a second."""
        with self._listing:
            if time.monotonic() - self._listed_at >= POLL_SECONDS:
                self._pods, self._listed_at = self.cluster.pods(self.name), time.monotonic()
            return self._pods

    def ready(self) -> list[str]:
        """Return the names of the pods to which a Service sends requests."""
        return [pod.name for pod in self.pods() if pod.is_ready and not pod.is_terminating]

    def num_open(self, pod: str) -> int:
        """Return the number of open streams of a pod."""
        with self._lock:
            return self._open[pod]

    @contextmanager
    def running(self, streams: int) -> Iterator[None]:
        """Keep this number of streams open; at the end, wait for the last ones."""
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(streams)]
        for worker in workers:
            worker.start()
        try:
            yield
        finally:
            self._stopped.set()
            for worker in workers:
                worker.join()

    def send(self, pod: str) -> Result:
        """Send one request to a pod and read its stream to the end."""
        began = time.monotonic()
        accepted = False
        try:
            connection = self.cluster.connection(self.cluster.namespace, pod, HTTP_PORT, SILENCE_SECONDS)
            with closing(connection):
                connection.request("POST", _PATH, json.dumps(self.body), self.headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    message = f"{answer.status}: {' '.join(answer.read().decode(errors='replace').split())[:200]}"
                    return self._ended(pod, "refused" if answer.status in (429, 503) else "lost", began, message)
                accepted = True
                self._count(pod, 1)
                try:
                    fault = _fault(answer)
                finally:
                    self._count(pod, -1)
                return self._ended(pod, "lost" if fault else "complete", began, fault)
        except PluginError as error:  # no connection, so no pod received the request
            return self._ended(pod, "refused", began, str(error))
        except (OSError, http.client.HTTPException) as error:
            words = str(error) or type(error).__name__
            return self._ended(pod, "lost", began, f"the stream broke: {words}" if accepted else words)

    def _work(self) -> None:
        while not self._stopped.is_set():
            with suppress(PluginError):  # the API server does not answer
                if pods := self.ready():
                    self.send(pods[next(self._turns) % len(pods)])
            self._stopped.wait(_PAUSE_SECONDS)

    def _count(self, pod: str, opened: int) -> None:
        with self._lock:
            self._open[pod] += opened

    def _ended(self, pod: str, outcome: Outcome, began: float, message: str) -> Result:
        result = Result(pod, outcome, time.monotonic() - began, message)
        with self._lock:
            self.results.append(result)
        return result


def _fault(answer: http.client.HTTPResponse) -> str:
    """Read a stream to its end; return what is wrong with it, else an empty string."""
    events = (line[5:].strip() for line in answer if line.startswith(b"data:"))
    pieces, ended = 0, False
    for data in events:
        if data == b"[DONE]":
            ended = True
        elif "error" in (event := json.loads(data)):
            return f"error in the stream: {event['error'].get('message')}"
        else:
            pieces += 1
    return "" if ended else f"the stream was cut after {pieces} pieces"
