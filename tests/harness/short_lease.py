"""A Lease that expires soon, and when its holder has renewed it."""

from __future__ import annotations

import time

from fastgen_operator.kinds import LEASE
from fastgen_operator.kube.transport import ApiServer
from harness.chart import SYSTEM

# The defaults, except for the interval of attempts: a holder keeps the Lease although its machine stops for seconds.
LEASE_SECONDS = 15
SHORT_LEASE = (
    *("--lease-seconds", str(LEASE_SECONDS)),
    *("--lease-renew-seconds", "10"),
    *("--lease-retry-seconds", "0.5"),
)


def wait_renewal(server: ApiServer) -> float:
    """Return after the next renewal of the operator's Lease, with a monotonic time shortly before it."""

    def version() -> str:
        found: str = server.request("GET", LEASE.path(SYSTEM, "fastgen-operator"))["metadata"]["resourceVersion"]
        return found

    before, first = time.monotonic(), version()
    while True:
        asked = time.monotonic()
        if version() != first:
            return before
        before = asked
        time.sleep(0.02)
