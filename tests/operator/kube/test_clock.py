"""The time of the cluster, on machines whose clock is wrong or changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from fastgen_operator.kube.clock import ClusterClock

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


@dataclass
class Machine:
    """A machine whose clock is ahead of the API server's."""

    ahead: timedelta = timedelta()
    elapsed: float = 1000.0

    def true_time(self) -> datetime:
        return NOON + timedelta(seconds=self.elapsed - 1000.0)

    def wall(self) -> datetime:
        return self.true_time() + self.ahead

    def clock(self) -> ClusterClock:
        return ClusterClock(self.wall, lambda: self.elapsed)

    def response(self, clock: ClusterClock, seconds: float = 0.0, late: float = 0.0) -> None:
        """Hear a response of a request that took a while, and was read late."""
        began = clock.elapsed()
        self.elapsed += seconds
        date = format_datetime(self.true_time().replace(microsecond=0), usegmt=True)
        self.elapsed += late
        clock.heard(date, began)

    def error(self, clock: ClusterClock) -> float:
        return abs((clock.now() - self.true_time()).total_seconds())


@pytest.mark.parametrize("ahead", [HOUR, -HOUR, timedelta(days=2000), timedelta(seconds=3)])
def test_the_clock_of_the_machine_does_not_matter_after_the_first_response(ahead: timedelta) -> None:
    machine = Machine(ahead)
    clock = machine.clock()
    assert clock.now() == NOON + ahead, "nothing else is known"
    machine.response(clock)
    assert machine.error(clock) <= 1
    machine.elapsed += 7200
    assert machine.error(clock) <= 1


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_jump_of_the_clock_changes_nothing(jump: timedelta) -> None:
    machine = Machine(timedelta(seconds=0.7))
    clock = machine.clock()
    before = clock.now()
    machine.ahead += jump
    assert clock.now() == before
    machine.elapsed += 10
    machine.response(clock)
    assert clock.now() == before + timedelta(seconds=10)


def test_clocks_that_agree_leave_the_time_as_exact_as_that_of_the_machine() -> None:
    machine = Machine(timedelta(seconds=0.4))
    clock = machine.clock()
    for _ in range(50):
        machine.elapsed += 0.37
        machine.response(clock, seconds=0.01)
        assert clock.now() == machine.wall()


def test_a_machine_that_corrects_its_clock_is_believed_again() -> None:
    """As at the start of a node, before it asks a time server."""
    machine = Machine(-HOUR)
    clock = machine.clock()
    machine.ahead = timedelta(seconds=0.2)
    machine.response(clock)
    assert clock.now() == machine.wall()


def test_a_slow_response_and_a_paused_reader_are_no_contradiction() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.response(clock, seconds=30.0)
    machine.response(clock, late=90.0)
    assert machine.error(clock) == 0


@pytest.mark.parametrize("date", [None, "", "yesterday", "Thu, 99 Nov 2026 12:49:47 GMT", "\x00"])
def test_a_header_that_cannot_be_read_counts_as_none(date: str | None) -> None:
    machine = Machine(HOUR)
    clock = machine.clock()
    clock.heard(date, clock.elapsed())
    assert clock.now() == NOON + HOUR
