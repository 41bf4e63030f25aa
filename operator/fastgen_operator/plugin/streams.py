"""A bounded load of streams on the pods of a FastGenDeployment, and how each request ended."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fastgen_operator.plugin.cluster import PluginError

# Between two requests of a worker.
_PAUSE_SECONDS: Final = 0.1
_PATH: Final = "/v1/completions"

# Refused: rejected before the first token by a pod that drains or is full; a client tries another pod.
Outcome = Literal["complete", "refused", "lost"]


@dataclass(frozen=True, slots=True)
class Result:
    """One request: its pod, how it ended, and how long it took in seconds."""

    pod: str
    outcome: Outcome
    seconds: float
    message: str = ""


@dataclass
class Load:
    """Workers that stream completions from pods, and what became of them. Thread-safe.

    Attributes:
        connect: opens a connection to a pod by its name.
        body: the request.
        ready: returns the names of the pods to send requests to.
    """

    connect: Callable[[str], http.client.HTTPConnection]
    body: dict[str, Any]
    headers: dict[str, str]
    ready: Callable[[], list[str]]
    results: list[Result] = field(default_factory=list)
    _open: Counter[str] = field(default_factory=Counter)
    _turn: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def num_open(self, pod: str) -> int:
        """Return how many streams of a pod have begun and not ended."""
        with self._lock:
            return self._open[pod]

    @contextmanager
    def running(self, streams: int) -> Iterator[None]:
        """Keep that many streams open; at the end, wait until the last ones have ended."""
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
            connection = self.connect(pod)
            try:
                connection.request("POST", _PATH, json.dumps(self.body), self.headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    message = f"{answer.status}: {' '.join(answer.read().decode(errors='replace').split())[:200]}"
                    return self._ended(pod, "refused" if answer.status in (429, 503) else "lost", began, message)
                accepted = True
                with self._counted(pod):
                    fault = _fault(answer)
                return self._ended(pod, "lost" if fault else "complete", began, fault)
            finally:
                connection.close()
        except PluginError as error:  # no connection: no pod has taken the request
            return self._ended(pod, "refused", began, str(error))
        except (OSError, http.client.HTTPException) as error:
            words = str(error) or type(error).__name__
            return self._ended(pod, "lost", began, f"the stream broke: {words}" if accepted else words)

    def _work(self) -> None:
        while not self._stopped.is_set():
            with suppress(PluginError):  # the API server does not answer: there is nothing to send to
                if pods := self.ready():
                    with self._lock:
                        self._turn += 1
                        pod = pods[self._turn % len(pods)]
                    self.send(pod)
            self._stopped.wait(_PAUSE_SECONDS)

    @contextmanager
    def _counted(self, pod: str) -> Iterator[None]:
        with self._lock:
            self._open[pod] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[pod] -= 1

    def _ended(self, pod: str, outcome: Outcome, began: float, message: str) -> Result:
        result = Result(pod, outcome, time.monotonic() - began, message)
        with self._lock:
            self.results.append(result)
        return result


def _fault(answer: http.client.HTTPResponse) -> str:
    """Read a stream to its end; return what is wrong with it, or an empty string."""
    pieces, ended = 0, False
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            continue
        event = json.loads(data)
        if "error" in event:
            return f"error in the stream: {event['error'].get('message')}"
        pieces += 1
    return "" if ended else f"the stream was cut after {pieces} pieces"
