"""The watchdog reports an engine as late, then as hung, if it has work and finishes no step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastgen.core.stats import SchedulerStats, StepStats
from fastgen.core.step_times import StepCoefficients
from fastgen.link.messages import EngineInfo, StepReport
from fastgen.link.watchdog import ProcessorWait, Watchdog

INFO = EngineInfo(
    architecture="a", device="cuda", dtype="bfloat16", vocabulary_size=10, hidden_size=8, num_parameters=1,
    max_model_length=64,
    token_budget=1000, max_sequences=4, block_size=16, num_blocks=100,
)  # fmt: skip


def report(*step_model: float, seconds: float = 0.1) -> StepReport:
    return StepReport([], StepStats(step_seconds=seconds), SchedulerStats(), StepCoefficients(*step_model))


def watchdog(*, steps: int = 16, model: tuple[float, ...] = ()) -> Watchdog:
    made = Watchdog(60, INFO)
    for _ in range(steps):
        made.record(report(*model))
    return made


def wait(subject: Watchdog, seconds: float, *, has_work: bool = True, start: float = 0.0, starved: float = 0.0) -> None:
    """Look once a period."""
    for number in range(round(seconds / subject.period) + 1):
        subject.look(start + number * subject.period, has_work=has_work, starved=starved * subject.period)


def test_an_engine_with_work_is_late_after_half_the_time_and_hung_after_all_of_it() -> None:
    subject = watchdog()
    wait(subject, 30)
    assert not subject.is_late
    wait(subject, 5, start=30)
    assert (subject.is_late, subject.is_hung) == (True, False)
    assert "may hang" in subject.message()
    wait(subject, 26, start=35)
    assert subject.is_hung
    assert "hangs: it has had work for 61 s" in subject.message()


def test_an_idle_engine_is_never_late() -> None:
    subject = watchdog()
    wait(subject, 3600, has_work=False)
    assert not subject.is_late


def test_a_report_shows_progress() -> None:
    subject = watchdog()
    wait(subject, 50)
    subject.record(report())
    wait(subject, 29, start=50)
    assert not subject.is_late


def test_only_time_in_which_the_server_ran_counts() -> None:
    """The clock goes on while the machine is suspended, or both processes are stopped."""
    subject = watchdog()
    wait(subject, 20)
    subject.look(20_000, has_work=True)
    assert not subject.is_late


def test_an_engine_that_waits_for_a_processor_has_more_time_but_not_without_end() -> None:
    subject = watchdog()
    wait(subject, 100, starved=0.8)
    assert not subject.is_late
    subject = watchdog()
    wait(subject, 290, starved=2.0)  # as of several threads
    assert not subject.is_late
    wait(subject, 320, starved=2.0, start=290)
    assert subject.is_hung


def test_the_wait_for_a_processor_is_that_of_the_thread_that_waited_longest(tmp_path: Path) -> None:
    def write(**seconds: float) -> None:
        for name, value in seconds.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "schedstat").write_text(f"123 {int(value * 1e9)} 7\n")

    starving = ProcessorWait(os.getpid())
    starving._tasks = tmp_path
    write(first=5.0, second=1.0)
    starving.since_last()
    write(first=5.25, second=1.5, third=9.0)
    assert starving.since_last() == 0.5
    assert starving.since_last() == 0.0
    starving._tasks = tmp_path / "ended"
    assert starving.since_last() == 0.0


def test_long_steps_get_twenty_times_their_predicted_time() -> None:
    assert watchdog(model=(0.0, 0.0, 0.0)).deadline == 60
    assert watchdog(model=(1.0, 0.004, 0.0)).deadline == pytest.approx(100)
    assert watchdog(model=(1.0, 0.0, 0.004)).deadline == pytest.approx(148)


def test_a_wild_prediction_does_not_switch_the_watchdog_off() -> None:
    assert watchdog(model=(0.0, 1.0, 1.0)).deadline == 600


def test_the_first_steps_may_compile_kernels() -> None:
    subject = watchdog(steps=15)
    assert subject.deadline == 600
    subject.record(report(seconds=0.0))  # a report without a step
    assert subject.deadline == 600
    subject.record(report())
    assert subject.deadline == 60
