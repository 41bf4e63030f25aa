"""The benchmark's prober treats the operator as the kubelet would."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from benchmarks.prober import Prober

from fastgen_operator.runtime.http_servers import health_server
from fastgen_operator.runtime.liveness import Stalled
from support.waiting import eventually


def probe(path: str, threshold: int) -> dict[str, object]:
    return {"httpGet": {"path": path}, "periodSeconds": 0.02, "timeoutSeconds": 60, "failureThreshold": threshold}


CONTAINER = {
    "startupProbe": probe("/healthz", 5),
    "livenessProbe": probe("/healthz", 3),
    "readinessProbe": probe("/readyz", 3),
}


class Operator:
    """A health server whose checks the test sets."""

    def __init__(self) -> None:
        self.is_healthy = self.is_ready = False
        self.server = health_server("127.0.0.1", 0, {"/healthz": self._healthz, "/readyz": self._readyz})
        self.server.start()

    def _healthz(self) -> dict[str, float]:
        return self._check(self.is_healthy)

    def _readyz(self) -> dict[str, float]:
        return self._check(self.is_ready)

    def _check(self, passes: bool) -> dict[str, float]:
        if not passes:
            raise Stalled("loopSeconds is 91.0, above 90")
        return {}


@pytest.fixture
def operator() -> Iterator[Operator]:
    started = Operator()
    yield started
    started.server.stop()


@pytest.fixture
def prober(operator: Operator) -> Iterator[Prober]:
    started = Prober(CONTAINER, f"http://127.0.0.1:{operator.server.port}")
    started.start()
    yield started
    started.stop()


def wait(poll: Callable[[], object], what: str) -> None:
    eventually(poll, within=20, what=what, every=0.01)


def test_a_startup_that_fails_up_to_its_threshold_is_a_kill(prober: Prober) -> None:
    wait(lambda: prober.kills, "a kill")
    assert prober.failed >= 5
    assert prober.kills[0].startswith("startupProbe after ")
    assert prober.kills[0].endswith('HTTP 500: {"error": "loopSeconds is 91.0, above 90"}')


def test_a_readiness_probe_kills_nothing_and_a_liveness_probe_does(operator: Operator, prober: Prober) -> None:
    operator.is_healthy = True
    wait(lambda: prober.sent - prober.failed > 3, "the liveness probe to pass")
    before = prober.failed
    wait(lambda: prober.failed > before + 5, "failed readiness probes")
    assert not [kill for kill in prober.kills if kill.startswith("readinessProbe")]
    assert prober.ready_seconds == 0
    operator.is_ready = True
    wait(lambda: prober.ready_seconds > 0, "readiness")
    prober.kills.clear()
    operator.is_healthy = False
    wait(lambda: prober.kills, "a kill")
    assert prober.kills[0].startswith("livenessProbe")
