"""Leader election on a Lease, with the protocol of client-go's leaderelection.

A candidate leads after it writes its identity into a free or expired Lease. The leader renews the Lease, and stops if
it cannot for `renew` seconds. A candidate takes the Lease for expired when it has seen no change of it for `duration`
seconds. Times are compared on the local clock only. Every write names the version that was read, so that one of two
concurrent writers fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from fastgen_operator.kinds import LEASE, Object
from fastgen_operator.kube.lease import Lease, Observation, claim, holder_of, may_take, observe_lease, released
from fastgen_operator.kube.transport import KubeError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """Times of an election, seconds.

    Attributes:
        duration: a Lease that has not changed for this long has expired: another candidate may acquire it.
        renew: a leader that cannot renew the Lease for this long stops.
        retry: interval between attempts to acquire or renew it.
    """

    duration: int = 15
    renew: float = 10.0
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry < self.renew < self.duration:
            raise ValueError("a lease needs retry < renew < duration")


class LeadershipLost(Exception):
    """Another operator leads, or may at any moment, so writes must stop. The message gives the cause."""


class Leadership:
    """One candidate of an election.

    Args:
        lease: the Lease to hold.
        identity: unique name of this process, also among earlier processes.
        terms: times of the election.
        clock: seconds, counted also while the process or the machine is suspended.
        show: called with True or False when this process starts or stops leading.
    """

    def __init__(
        self,
        lease: Lease,
        identity: str,
        terms: Terms,
        clock: Callable[[], float],
        show: Callable[[bool], object],
    ) -> None:
        self._lease, self._identity, self._terms, self._clock, self._show = lease, identity, terms, clock, show
        self._until = float("-inf")
        self._observation: Observation | None = None
        self._is_known = False
        self._is_over = False
        self._failure = ""
        self._won = asyncio.Event()
        # A thread of its own: hanging reconciles must not delay the renewal.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lease")

    def holds(self) -> bool:
        """Return whether this process leads now; may be called from any thread."""
        return self._clock() < self._until

    def lease(self) -> Object | None:
        """Return the Lease as last read or written; None unless this process leads.

        May be called from any thread.
        """
        return self._observation.lease if self._observation is not None and self.holds() else None

    async def wait(self) -> None:
        """Return when this process leads."""
        await self._won.wait()

    async def keep(self) -> None:
        """Acquire the Lease when it is free or expired, and renew it until it is released.

        Raises:
            LeadershipLost: the Lease was held and is lost.
        """
        loop = asyncio.get_running_loop()
        while not self._is_over:
            attempt = loop.run_in_executor(self._thread, self._attempt)
            leading = self._won.is_set()
            await asyncio.wait({attempt}, timeout=max(0.0, self._until - self._clock()) if leading else None)
            if attempt.done():
                attempt.result()
            if leading and not self.holds() and not self._is_over:
                self._show(False)
                raise LeadershipLost(self._failure or f"not renewed for {self._terms.renew:g} s")
            if not leading and self.holds():
                logger.info("leading as %s", self._identity)
                self._show(True)
                self._won.set()
            await asyncio.sleep(self._terms.retry)

    async def release(self) -> None:
        """Release the Lease; call it after the last write."""
        self._is_over = True
        self._until = float("-inf")
        if self._won.is_set():
            self._show(False)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._release)

    def _attempt(self) -> None:
        """Try once to acquire or renew. Leadership counts from before the request, which may take long."""
        if self._is_over:
            return
        start = self._clock()
        try:
            if not self._is_known:
                self._read()
            assert self._observation is not None
            if not may_take(self._observation, self._identity, self._clock()):
                self._is_known = False
                if self._won.is_set():
                    self._until = float("-inf")
                    self._failure = f"{holder_of(self._observation.lease)} has taken the lease"
                return
            taken = claim(self._observation.lease, self._identity, self._terms.duration, datetime.now(UTC))
            self._observation = Observation(self._lease.write(taken), self._clock())
        except KubeError as error:
            # After 409 another candidate was faster; after other errors the outcome is unknown. The next read tells.
            self._is_known = False
            if error.status != 409 and str(error) != self._failure:
                self._failure = str(error)
                logger.warning("%s of the election: %s", LEASE.name, error)
            return
        self._is_known, self._failure = True, ""
        self._until = start + self._terms.renew

    def _read(self) -> None:
        before = self._observation
        self._observation = observe_lease(before, self._lease.read(), self._clock())
        holder = holder_of(self._observation.lease)
        if holder not in ("", self._identity, holder_of(before.lease if before else None)):
            logger.info("standing by: %s leads", holder)

    def _release(self) -> None:
        try:
            lease = self._lease.read()
            if lease is not None and holder_of(lease) == self._identity:
                self._lease.write(released(lease, datetime.now(UTC)))
        except KubeError as error:
            # The Lease expires.
            logger.warning("releasing the lease: %s", error)


class SoleLeadership:
    """Leadership of a single operator without an election: it always leads."""

    def holds(self) -> bool:
        """Return True."""
        return True

    def lease(self) -> None:
        """Return None: there is no Lease."""

    async def wait(self) -> None:
        """Return at once."""

    async def keep(self) -> None:
        """Wait forever."""
        await asyncio.Event().wait()

    async def release(self) -> None:
        """Do nothing."""
