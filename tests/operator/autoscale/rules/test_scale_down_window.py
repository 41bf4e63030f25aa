"""The learned scale-down window."""

from __future__ import annotations

from fastgen_operator.autoscale.rules.scale_down_window import MOST_FACTOR, QUIET_WINDOWS, ScaleDownWindow

WINDOW = 300.0


def test_a_burst_within_one_window_of_a_release_doubles_the_window() -> None:
    learned = ScaleDownWindow().after_scale_down(1000.0)
    assert learned.after_burst(1000.0 + WINDOW, WINDOW).factor == 2
    assert learned.after_burst(1001.0 + WINDOW, WINDOW).factor == 1


def test_a_burst_without_a_release_before_it_changes_nothing() -> None:
    assert ScaleDownWindow().after_burst(1000.0, WINDOW) == ScaleDownWindow()


def test_a_scale_down_counts_as_a_mistake_once_however_many_replicas_the_burst_adds() -> None:
    once = ScaleDownWindow().after_scale_down(1000.0).after_burst(1010.0, WINDOW)
    assert once.after_burst(1020.0, WINDOW) == once


def test_with_a_longer_window_a_later_burst_counts() -> None:
    learned = ScaleDownWindow(factor=2).after_scale_down(1000.0)
    assert learned.after_burst(1000.0 + 2 * WINDOW, WINDOW).factor == 4


def test_the_window_is_bounded() -> None:
    learned = ScaleDownWindow(factor=MOST_FACTOR).after_scale_down(1000.0)
    assert learned.after_burst(1010.0, WINDOW).factor == MOST_FACTOR


def test_windows_without_a_mistake_halve_the_window() -> None:
    learned = ScaleDownWindow(factor=4, learned=0.0)
    quiet = QUIET_WINDOWS * 4 * WINDOW
    assert learned.after_quiet(quiet, WINDOW) == learned
    halved = learned.after_quiet(quiet + 1, WINDOW)
    assert halved.factor == 2
    # The next halving needs as many of the new windows.
    assert halved.after_quiet(quiet + 2, WINDOW) == halved
    assert ScaleDownWindow().after_quiet(1e9, WINDOW) == ScaleDownWindow()
