"""Recommend a number of replicas while something else sets it. Pure.

The policy decides from the number of replicas that it requested last. In a dry run nothing carried that number out, so
it decides from the number that runs if that is smaller. Its scale-down window then has no effect on recommendations
above the number that runs, so they are held for the same time here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.measure.averages import WindowMaximum
from fastgen_operator.autoscale.rules.recommend import State


@dataclass(frozen=True, slots=True)
class DryRun:
    """Recommendations since the number of replicas changed.

    Attributes:
        running: number of replicas that run.
        recent: recommendations within the scale-down window.
        shown: the last one shown.
    """

    running: int = -1
    recent: WindowMaximum = field(default_factory=WindowMaximum)
    shown: Decision | None = None

    def show(self, decision: Decision, running: int, window: float, now: float) -> DryRun:
        """Return the state with the decision to show: one above `running` is held for `window` seconds."""
        recent = (self.recent if running == self.running else WindowMaximum()).add(now, decision.replicas, window)
        highest = round(recent.value)
        replicas = highest if highest > running else decision.replicas
        # The policy repeats its reason with other figures as long as the number does not follow.
        same = self.shown is not None and self.shown.replicas == replicas
        change = self.shown.change if same and self.shown is not None else decision.change
        return DryRun(running, recent, replace(decision, replicas=replicas, change=change))


def rebased(state: State, running: int) -> State:
    """Return the state with the number that runs as the last decision if that is smaller."""
    return replace(state, replicas=running) if 0 < running < state.replicas else state
