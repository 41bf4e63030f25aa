"""Which of several operators may write: the election of Kubernetes' own controllers, on a Lease.

The rules (client-go's leaderelection): whoever writes its name into a free Lease leads; it renews the Lease, and stops
when it could not for `renew` seconds; another one takes it `duration` seconds after it last saw it change. Times are
compared on one's own clock only. Every write names the version that was read, so that of two takers one loses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from fastgen_operator.kinds import LEASE, Object
from fastgen_operator.kube.transport import KubeError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """Times of an election, seconds.

    Attributes:
        duration: a Lease that was not seen to change for this long is free.
        renew: a leader that could not renew for this long stops.
        retry: between two tries to take or to renew.
    """

    duration: int = 15
    renew: float = 10.0
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry < self.renew < self.duration:
            raise ValueError("a lease needs retry < renew < duration")


DEFAULT_TERMS: Final = Terms()


@dataclass(frozen=True, slots=True)
class Sighting:
    """A Lease as it was last read (None where there was none), and since when it is like that, on one's own clock."""

    lease: Object | None
    since: float


def sight(before: Sighting | None, lease: Object | None, now: float) -> Sighting:
    """What is known after a read. Only a change of the spec is a sign of life; labels may be anybody's."""
    unchanged = before is not None and _spec(before.lease) == _spec(lease)
    return Sighting(lease, before.since if before is not None and unchanged else now)


def holder_of(lease: Object | None) -> str:
    """Who holds it; empty where nobody does."""
    return str(_spec(lease).get("holderIdentity") or "")


def may_take(sighting: Sighting, identity: str, now: float) -> bool:
    """Whether the Lease is free, has run out, or is one's own."""
    if holder_of(sighting.lease) in ("", identity):
        return True
    return now >= sighting.since + float(_spec(sighting.lease).get("leaseDurationSeconds") or 0)


def claim(lease: Object | None, identity: str, duration: int, now: datetime) -> Object:
    """The Lease with one's name in it: taken over, or renewed where it is one's own."""
    old, time = _spec(lease), _micro_time(now)
    spec = {"holderIdentity": identity, "leaseDurationSeconds": duration, "renewTime": time}
    if lease is None:
        return {"spec": {**spec, "acquireTime": time, "leaseTransitions": 0}}
    if holder_of(lease) == identity:
        return {**lease, "spec": {**old, **spec}}
    transitions = int(old.get("leaseTransitions") or 0) + 1
    return {**lease, "spec": {**old, **spec, "acquireTime": time, "leaseTransitions": transitions}}


def released(lease: Object, now: datetime) -> Object:
    """The Lease given back, so that nobody has to wait until it runs out."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": "", "renewTime": _micro_time(now)}}


def _spec(lease: Object | None) -> dict[str, Any]:
    return dict(lease.get("spec") or {}) if lease else {}


def _micro_time(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaseStore(Protocol):
    """Reads and writes one Lease; each raises KubeError."""

    def read(self) -> Object | None:
        """The Lease, or None where there is none."""
        ...

    def write(self, lease: Object) -> Object:
        """Creates it, or replaces exactly the version that was read; returns what is stored."""
        ...


class LeadershipLost(Exception):
    """Another operator leads, or may at any moment: nothing more may be written. The message says why."""


class Leadership:
    """One candidate of an election.

    Args:
        store: the Lease.
        identity: this process's name in it, unlike that of any other process, earlier ones included.
        terms: its times.
        clock: seconds that go on while the process, or the machine, is stopped.
        show: told whenever this process begins or ceases to lead.
    """

    def __init__(
        self,
        store: LeaseStore,
        identity: str,
        terms: Terms,
        clock: Callable[[], float],
        show: Callable[[bool], object],
    ) -> None:
        self._store, self._identity, self._terms, self._clock, self._show = store, identity, terms, clock, show
        self._until = float("-inf")
        self._sighting: Sighting | None = None
        self._is_known = False
        self._is_over = False
        self._trouble = ""
        self._won = asyncio.Event()
        # Its own thread: visits that hang must not keep the Lease from being renewed.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lease")

    def holds(self) -> bool:
        """Whether this process leads at this moment; from any thread."""
        return self._clock() < self._until

    async def wait(self) -> None:
        """Returns when this process has begun to lead."""
        await self._won.wait()

    async def keep(self) -> None:
        """Takes the Lease when it is free and renews it until it is released.

        Raises:
            LeadershipLost: it was held and is not any more.
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
                raise LeadershipLost(self._trouble or f"not renewed for {self._terms.renew:g} s")
            if not leading and self.holds():
                logger.info("leading as %s", self._identity)
                self._show(True)
                self._won.set()
            await asyncio.sleep(self._terms.retry)

    async def release(self) -> None:
        """Gives the Lease back; for the moment when nothing will be written any more."""
        self._is_over = True
        self._until = float("-inf")
        if self._won.is_set():
            self._show(False)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._give_back)

    def _attempt(self) -> None:
        """One try to take or to renew. The time that counts is the one before the request: it may take long."""
        if self._is_over:
            return
        start = self._clock()
        try:
            if not self._is_known:
                self._look()
            assert self._sighting is not None
            if not may_take(self._sighting, self._identity, self._clock()):
                self._is_known = False
                if self._won.is_set():
                    self._until = float("-inf")
                    self._trouble = f"{holder_of(self._sighting.lease)} has taken the lease"
                return
            taken = claim(self._sighting.lease, self._identity, self._terms.duration, datetime.now(UTC))
            self._sighting = Sighting(self._store.write(taken), self._clock())
        except KubeError as error:
            # 409: somebody was quicker. Otherwise it is not known whether it was written. Both are seen by a read.
            self._is_known = False
            if error.status != 409 and str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("%s of the election: %s", LEASE.name, error)
            return
        self._is_known, self._trouble = True, ""
        self._until = start + self._terms.renew

    def _look(self) -> None:
        before = self._sighting
        self._sighting = sight(before, self._store.read(), self._clock())
        holder = holder_of(self._sighting.lease)
        if holder not in ("", self._identity, holder_of(before.lease if before else None)):
            logger.info("standing by: %s leads", holder)

    def _give_back(self) -> None:
        try:
            lease = self._store.read()
            if lease is not None and holder_of(lease) == self._identity:
                self._store.write(released(lease, datetime.now(UTC)))
        except KubeError as error:
            # It runs out by itself.
            logger.warning("giving the lease back: %s", error)


class SoleLeadership:
    """For an operator of which there is only one: it always leads."""

    def holds(self) -> bool:
        """True."""
        return True

    async def wait(self) -> None:
        """Returns at once."""

    async def keep(self) -> None:
        """Never ends."""
        await asyncio.Event().wait()

    async def release(self) -> None:
        """Does nothing."""
