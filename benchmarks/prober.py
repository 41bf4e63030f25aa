"""Sends the probes of a container as the kubelet does, and records when it would have killed the container."""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

# Kubernetes' defaults of the fields that a probe may leave out.
DEFAULTS = {"initialDelaySeconds": 0, "periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3}


class Prober:
    """The startup probe until it passes once, and then the liveness and readiness probes, each at its own period.

    It kills nothing: after a threshold of failures it counts from zero.

    Args:
        container: a container with `startupProbe`, `livenessProbe` and `readinessProbe`.
        url: address and port of its health server.

    Attributes:
        sent, failed: probes so far, and those that failed. Failed startup and readiness probes are normal at first.
        slowest_seconds: time of the slowest response.
        ready_seconds: time from the last start until the readiness probe passed; 0 if it has not.
        kills: for each time when the container would have been killed: the probe, the time since the start, the error.
    """

    def __init__(self, container: dict[str, Any], url: str) -> None:
        names = ("startupProbe", "livenessProbe", "readinessProbe")
        self._probes = {name: {**DEFAULTS, **container[name]} for name in names}
        self._url = url
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._started_at = 0.0
        self.sent = self.failed = 0
        self.slowest_seconds = self.ready_seconds = 0.0
        self.kills: list[str] = []

    def start(self) -> None:
        """Probe a container that has just been started."""
        self._stopped.clear()
        self._started_at, self.ready_seconds = time.monotonic(), 0.0
        self._threads = [threading.Thread(target=self._run, name="prober", daemon=True)]
        self._threads[0].start()

    def stop(self) -> None:
        """Stop to probe. Call it before the container is stopped."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)
        self._threads = []

    def _run(self) -> None:
        self._repeat("startupProbe", until_passed=True)
        rest = [threading.Thread(target=self._repeat, args=(name,)) for name in ("livenessProbe", "readinessProbe")]
        for thread in rest:
            thread.start()
        for thread in rest:
            thread.join()

    def _repeat(self, name: str, *, until_passed: bool = False) -> None:
        probe, failures = self._probes[name], 0
        self._stopped.wait(probe["initialDelaySeconds"])
        while not self._stopped.is_set():
            began = time.monotonic()
            error = self._send(probe)
            if self._stopped.is_set():
                return
            if error is None:
                failures = 0
                if until_passed:
                    return
                if name == "readinessProbe" and not self.ready_seconds:
                    self.ready_seconds = time.monotonic() - self._started_at
            else:
                failures += 1
                if failures >= probe["failureThreshold"] and name != "readinessProbe":
                    failures = 0
                    self.kills.append(f"{name} after {time.monotonic() - self._started_at:.0f} s: {error}")
            self._stopped.wait(max(0.0, probe["periodSeconds"] - (time.monotonic() - began)))

    def _send(self, probe: dict[str, Any]) -> str | None:
        """Send one probe; return what is wrong with the response, or None."""
        began = time.monotonic()
        error: str | None = None
        try:
            # A connection of its own for each probe, as the kubelet's.
            with urlopen(f"{self._url}{probe['httpGet']['path']}", timeout=probe["timeoutSeconds"]):
                pass
        except HTTPError as refused:
            with refused:
                error = f"HTTP {refused.code}: {refused.read().decode(errors='replace').strip()}"
        except OSError as failure:
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            self.sent += 1
            self.failed += error is not None
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)
        return error
