"""A stand-in for a pod of the gateway: it answers /demand, and holds nothing."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from fastgen_operator.autoscale.scrape.gateways import GATEWAY_PORT
from harness.get_server import GetServer


@dataclass
class StandInGateway:
    """Answers at an address of its own. A test sets what it says.

    Attributes:
        address: an IPv4 address of the loopback network.
        held: requests that it says to hold, by NAMESPACE/NAME: all deployments that it routes to.
        idle_seconds: time since the last request, for all of them; None for none since its start.
        started_seconds: age that it reports.
        answers: whether it answers; otherwise it hangs.
        asked: number of requests so far.
    """

    address: str
    held: dict[str, int] = field(default_factory=dict)
    idle_seconds: float | None = None
    started_seconds: float = 1e6
    answers: bool = True
    asked: int = 0
    asked_at: float = 0.0
    _closing: threading.Event = field(default_factory=threading.Event)
    _server: GetServer | None = None

    def start(self) -> StandInGateway:
        """Serve until closed."""
        self._server = GetServer(self.address, GATEWAY_PORT, self._answer)
        return self

    def demand(self) -> Any:
        """Return what it answers now."""
        deployments = {
            name: {"held": held, "heldTokens": 0, "oldestHeldSeconds": 0.0, "idleSeconds": self.idle_seconds}
            for name, held in self.held.items()
        }
        return {"startedSeconds": self.started_seconds, "deployments": deployments}

    def close(self) -> None:
        """Stop serving and release the address."""
        self._closing.set()
        if self._server is not None:
            self._server.close()

    def _answer(self, path: str) -> tuple[int, bytes]:
        self.asked += 1
        self.asked_at = time.monotonic()
        if not self.answers:
            self._closing.wait(30)
        return 200 if path == "/demand" else 404, json.dumps(self.demand()).encode()
