"""A process that does not run is found by the age of its last sign of life, not by what it has to do."""

from __future__ import annotations

import os
import random
import signal
import subprocess

import pytest

from fastgen import exit_codes
from fastgen.link.silence import Silence, is_stopped
from support.waiting import eventually

PERIOD = 0.5
# The project promises that a stopped rank ends the group within 5 s; killing it takes the rest.
MOST_SECONDS = 4.5


@pytest.mark.parametrize("seed", range(20))
def test_a_silent_process_is_found_in_time_whenever_it_falls_silent(seed: int) -> None:
    rng = random.Random(seed)
    silence, now, last = Silence(PERIOD), 0.0, rng.uniform(0, 3)
    while not silence.is_hung:
        now += rng.uniform(0.5, 1.0) * PERIOD
        # At the first look after its last sign of life, there was one since the look before.
        silence.look(now, is_silent=now - last > PERIOD, starved=0.0)
    assert 3.0 < now - last < MOST_SECONDS


def test_a_process_that_gives_signs_of_life_is_never_hung() -> None:
    silence = Silence(PERIOD)
    for number in range(1000):
        silence.look(number * PERIOD, is_silent=number % 6 != 0, starved=0.0)
        assert not silence.is_hung


def test_time_without_a_processor_counts_a_tenth() -> None:
    silence = Silence(PERIOD)
    for number in range(61):
        assert not silence.is_hung, number
        silence.look(number * PERIOD, is_silent=True, starved=PERIOD)
    assert silence.seconds == pytest.approx(3.0)
    silence.look(61 * PERIOD, is_silent=True, starved=PERIOD)
    assert silence.is_hung
    assert silence.failure().exit_code == exit_codes.HUNG


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """While the machine is suspended, say."""
    silence = Silence(PERIOD)
    silence.look(0.0, is_silent=True, starved=0.0)
    silence.look(3600.0, is_silent=True, starved=0.0)
    assert silence.seconds == 2 * PERIOD


def test_a_stopped_process_is_told_from_one_that_waits_or_has_ended() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: is_stopped(process.pid), within=60, what="the process to stop")
            process.send_signal(signal.SIGCONT)
            eventually(lambda: not is_stopped(process.pid), within=60, what="the process to go on")
        finally:
            process.kill()
    assert not is_stopped(process.pid)
    assert not is_stopped(os.getpid())
