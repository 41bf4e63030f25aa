"""Leader election on a Lease, with the protocol of client-go's leaderelection.

A candidate leads after it writes its identity into a free Lease. The leader renews the Lease, and stops if it cannot
for `renew` seconds. Another candidate acquires the Lease `duration` seconds after it last saw it change. Times are
compared on the local clock only. Every write names the version that was read, so that one of two concurrent writers
fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from fastgen_operator.kinds import LEASE, Object
from fastgen_operator.kube.lease import Lease
from fastgen_operator.kube.transport import KubeError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """Times of an election, seconds.

    Attributes:
        duration: a Lease that has not changed for this long is free.
        renew: a leader that cannot renew the Lease for this long stops.
        retry: interval between attempts to acquire or renew it.
    """

    duration: int = 15
    renew: float = 10.0
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry < self.renew < self.duration:
            raise ValueError("a lease needs retry < renew < duration")


DEFAULT_TERMS: Final = Terms()


@dataclass(frozen=True, slots=True)
class Observation:
    """A Lease as last read (None if missing), and the local time since when it is unchanged."""

    lease: Object | None
    since: float


def observe_lease(before: Observation | None, lease: Object | None, now: float) -> Observation:
    """Combine a read with the observation before.

    Only a change of the spec counts: others may edit labels.
    """
    unchanged = before is not None and _spec(before.lease) == _spec(lease)
    return Observation(lease, before.since if before is not None and unchanged else now)


def holder_of(lease: Object | None) -> str:
    """Return the identity of the holder; empty if the Lease is free."""
    return str(_spec(lease).get("holderIdentity") or "")


def may_take(observation: Observation, identity: str, now: float) -> bool:
    """Return whether the Lease is free, has expired, or is held by `identity`."""
    if holder_of(observation.lease) in ("", identity):
        return True
    return now >= observation.since + float(_spec(observation.lease).get("leaseDurationSeconds") or 0)


def claim(lease: Object | None, identity: str, duration: int, now: datetime) -> Object:
    """Return the Lease as held by `identity`: acquired, or renewed if it held it before."""
    old, time = _spec(lease), _micro_time(now)
    spec = {"holderIdentity": identity, "leaseDurationSeconds": duration, "renewTime": time}
    if lease is None:
        return {"spec": {**spec, "acquireTime": time, "leaseTransitions": 0}}
    if holder_of(lease) == identity:
        return {**lease, "spec": {**old, **spec}}
    transitions = int(old.get("leaseTransitions") or 0) + 1
    return {**lease, "spec": {**old, **spec, "acquireTime": time, "leaseTransitions": transitions}}


def released(lease: Object, now: datetime) -> Object:
    """Return the Lease without a holder, so that another candidate acquires it before it expires."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": "", "renewTime": _micro_time(now)}}


def _spec(lease: Object | None) -> dict[str, Any]:
    return dict(lease.get("spec") or {}) if lease else {}


def _micro_time(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeadershipLost(Exception):
    """Another operator leads, or may at any moment: no more writes are allowed.

    The message gives the cause.
    """


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

    async def wait(self) -> None:
        """Return when this process leads."""
        await self._won.wait()

    async def keep(self) -> None:
        """Acquire the Lease when it is free, and renew it until it is released.

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
        """Try once to acquire or renew. The term starts before the request, which may take long."""
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
            # It expires.
            logger.warning("releasing the lease: %s", error)


class SoleLeadership:
    """Leadership of a single operator without an election: it always leads."""

    def holds(self) -> bool:
        """Return True."""
        return True

    async def wait(self) -> None:
        """Return at once."""

    async def keep(self) -> None:
        """Wait forever."""
        await asyncio.Event().wait()

    async def release(self) -> None:
        """Do nothing."""
