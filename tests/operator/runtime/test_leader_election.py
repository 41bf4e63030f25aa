"""Leader election on a Lease, with a fake clock and a fake store."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.lease import claim, may_take, observe_lease, released
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.metrics import Metrics
from fastgen_operator.runtime.leader_election import Leadership, LeadershipLost, Terms
from support.waiting import eventually

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
TERMS = Terms(duration=15, renew=10.0, retry=0.01)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Store:
    """A Lease with resource versions, as in an API server."""

    lease: Object | None = None
    version: int = 0
    fault: KubeError | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    before_write: Callable[[], None] = lambda: None
    loses_answers: bool = False
    asked: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def read(self) -> Object | None:
        self._answer()
        return copy.deepcopy(self.lease)

    def write(self, lease: Object) -> Object:
        self._answer()
        self.before_write()
        current = str(self.version) if self.lease else None
        if lease.get("metadata", {}).get("resourceVersion") != current:
            raise KubeError(409, "the object has been modified")
        self.version += 1
        self.lease = {**copy.deepcopy(lease), "metadata": {"resourceVersion": str(self.version)}}
        if self.loses_answers:
            raise KubeError(0, "connection reset")
        return copy.deepcopy(self.lease)

    def _answer(self) -> None:
        assert self.gate.wait(60)
        self.asked += 1
        if self.fault is not None:
            raise self.fault

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec


def lease_of(holder: str, *, renewed: str = "r1", duration: int = 15) -> Object:
    spec = {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": duration, "leaseTransitions": 4}
    return {"metadata": {"resourceVersion": "1"}, "spec": {**spec, "acquireTime": "a1"}}


def candidate(store: Store, clock: Clock, identity: str = "me", shown: list[bool] | None = None) -> Leadership:
    return Leadership(store, identity, TERMS, clock, (shown if shown is not None else []).append)


async def holds(leadership: Leadership) -> None:
    await asyncio.wait_for(leadership.wait(), 60)
    assert leadership.holds()


async def let_attempts_pass(store: Store, count: int) -> None:
    """Return after so many more requests for the Lease."""
    target = store.asked + count
    await asyncio.to_thread(eventually, lambda: store.asked >= target, within=20, what=f"{count} requests", every=0.01)


@contextlib.asynccontextmanager
async def running(leadership: Leadership) -> Any:
    task = asyncio.create_task(leadership.keep())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, LeadershipLost):
            await task


def test_a_lease_can_be_acquired_if_it_is_unheld_expired_or_already_held_by_the_candidate() -> None:
    assert may_take(observe_lease(None, None, 0), "me", 0)
    assert may_take(observe_lease(None, lease_of(""), 0), "me", 0)
    assert may_take(observe_lease(None, lease_of("me"), 0), "me", 0)
    theirs = observe_lease(None, lease_of("they"), 0)
    assert not may_take(theirs, "me", 14.9)
    assert may_take(theirs, "me", 15)


def test_expiry_uses_the_local_clock_and_only_a_renewal_resets_it() -> None:
    # The holder's clock is a day behind, so its times are always in the past.
    first = observe_lease(None, lease_of("they", renewed="2025-12-31T12:00:00.000000Z"), 100)
    labelled = {**lease_of("they", renewed="2025-12-31T12:00:00.000000Z"), "metadata": {"resourceVersion": "2"}}
    second = observe_lease(first, labelled, 110)
    assert second.since == 100
    assert not may_take(second, "me", 114)
    assert observe_lease(second, lease_of("they", renewed="2025-12-31T12:00:02.000000Z"), 112).since == 112


def test_a_takeover_counts_a_transition_and_a_renewal_does_not() -> None:
    fresh = claim(None, "me", 15, NOW)
    assert fresh["spec"] == {
        "holderIdentity": "me",
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-01-01T12:00:00.000000Z",
        "renewTime": "2026-01-01T12:00:00.000000Z",
        "leaseTransitions": 0,
    }
    taken = claim(lease_of("they"), "me", 15, NOW)
    assert (taken["spec"]["leaseTransitions"], taken["spec"]["acquireTime"][:4]) == (5, "2026")
    renewed = claim(taken, "me", 15, NOW.replace(hour=13))
    assert (renewed["spec"]["leaseTransitions"], renewed["spec"]["acquireTime"]) == (5, taken["spec"]["acquireTime"])
    assert renewed["spec"]["renewTime"].startswith("2026-01-01T13")
    assert may_take(observe_lease(None, released(renewed, NOW), 0), "another", 0)


def test_inconsistent_election_times_are_rejected() -> None:
    for times in ((15, 15, 2), (15, 10, 10), (15, 10, 0)):
        with pytest.raises(ValueError, match="retry < renew < duration"):
            Terms(*times)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 20), st.booleans()), max_size=60),
)
def test_two_candidates_never_lead_at_once_despite_pauses_and_lost_responses(
    steps: list[tuple[str, float, bool]],
) -> None:
    """In each step time advances and one candidate tries. Its response may be lost after the server committed."""
    clock, store = Clock(), Store()
    candidates = {name: candidate(store, clock, name) for name in "abc"}
    for name, passing, store.loses_answers in steps:
        clock.now += passing
        candidates[name]._attempt()
        assert sum(each.holds() for each in candidates.values()) <= 1


async def test_the_first_candidate_leads_and_the_second_stands_by_until_the_release() -> None:
    store, clock = Store(), Clock()
    shown: list[bool] = []
    first, second = candidate(store, clock, "first", shown), candidate(store, clock, "second")
    async with running(first):
        await holds(first)
        async with running(second):
            clock.now += 9
            await let_attempts_pass(store, 8)
            assert not second.holds()
            await first.release()
            assert not first.holds()
            await holds(second)
            assert store.spec["holderIdentity"] == "second"
            assert store.spec["leaseTransitions"] == 1
    assert shown == [True, False]


async def test_a_leader_that_cannot_renew_stops_at_its_deadline_even_if_its_request_hangs() -> None:
    store, clock = Store(), Clock()
    leader = candidate(store, clock)
    async with running(leader) as task:
        await holds(leader)
        store.gate.clear()
        await asyncio.sleep(0.05)
        assert leader.holds(), "a request that hangs costs nothing before the deadline"
        clock.now += 10
        assert not leader.holds(), "no write may leave from this moment on, whether or not the loop has turned"
        store.gate.set()
        with pytest.raises(LeadershipLost):
            await asyncio.wait_for(task, 60)


async def test_a_late_renewal_counts_from_the_time_of_its_request() -> None:
    store, clock = Store(), Clock()
    leader = candidate(store, clock)
    leader._attempt()
    assert leader.holds()

    def pause() -> None:
        clock.now += 60

    store.before_write = pause
    leader._attempt()
    assert not leader.holds()


async def test_a_leader_stops_at_once_when_another_candidate_holds_the_lease() -> None:
    store, clock = Store(), Clock()
    leader = candidate(store, clock)
    async with running(leader) as task:
        await holds(leader)
        store.lease, store.version = lease_of("they"), 1
        store.lease["metadata"]["resourceVersion"] = "999"
        store.version = 999
        with pytest.raises(LeadershipLost, match="they has taken the lease"):
            await asyncio.wait_for(task, 60)


async def test_a_deleted_lease_is_created_again() -> None:
    store, clock = Store(), Clock()
    leader = candidate(store, clock)
    async with running(leader) as task:
        await holds(leader)
        store.lease = None
        await asyncio.to_thread(
            eventually, lambda: store.lease is not None, within=20, what="another lease", every=0.01
        )
        assert not task.done()
        assert leader.holds()


async def test_an_election_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = Store(fault=KubeError(500, "etcd is tired")), Clock()
    leader = candidate(store, clock)
    async with running(leader):
        await let_attempts_pass(store, 4)
        assert not leader.holds()
        assert [record.message for record in caplog.records] == ["Lease of the election: etcd is tired"]
        store.fault = None
        await holds(leader)


def test_nothing_is_written_without_leadership() -> None:
    class Silent:
        def request(self, method: str, *_: object) -> Object:
            assert method == "GET", f"{method} was sent"
            return {}

        def list(self, *_: object) -> tuple[str, Iterator[Object]]:
            return "1", iter(())

    server: Any = Silent()
    client = KubeClient(server, InformerCache(), Metrics(), lambda: False)
    metadata = {"namespace": "n", "name": "x", "uid": "u", "resourceVersion": "1"}
    some = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
    assert client.list(FASTGEN, None)[0] == "1"
    for write in (
        lambda: client.apply(DEPLOYMENT, some, some),
        lambda: client.delete(DEPLOYMENT, some),
        lambda: client.patch_status(some, {}),
        lambda: client.annotate(DEPLOYMENT, some, {}),
        lambda: client.create_event(some, {}),
        lambda: client.count_event(some, "x", 2, ""),
    ):
        with pytest.raises(KubeError, match="no longer the leader"):
            write()


@pytest.mark.parametrize(("is_overload", "requests"), [(True, 1), (False, 2)])
def test_retry_after_delays_a_request_and_if_the_api_server_is_overloaded_all(is_overload: bool, requests: int) -> None:
    class Busy:
        def __init__(self) -> None:
            self.asked = 0

        def request(self, *_: object) -> Object:
            self.asked += 1
            raise KubeError(429, "too many requests", 60, is_status=not is_overload)

    busy = Busy()
    server: Any = busy
    client = KubeClient(server, InformerCache(), Metrics(), lambda: True)
    for name in ("chat", "chat", "other", "other", "chat"):
        with pytest.raises(KubeError, match="too many requests") as refused:
            client.get(DEPLOYMENT, "space", name)
        assert (refused.value.status, refused.value.is_overload) == (429, is_overload)
        assert 59 < refused.value.retry_after <= 60
    assert busy.asked == requests
