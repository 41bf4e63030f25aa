"""Recommend a number of replicas while something else sets it. Pure.

In a dry run, `recommend` decides from the present number of replicas if that is smaller than its last decision (see
`decide`). Its scale-down window then has no effect on recommendations above the present number, so they are held for
the same time here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.measure.averages import WindowMaximum


@dataclass(frozen=True, slots=True)
class DryRun:
    """Recommendations since the number of replicas changed.

    Attributes:
        running: present number of replicas.
        recent: recommendations within the scale-down window.
        shown: the last decision shown.
    """

    running: int = -1
    recent: WindowMaximum = field(default_factory=WindowMaximum)
    shown: Decision | None = None

    def show(self, decision: Decision, running: int, window: float, now: float) -> tuple[Decision, DryRun]:
        """Return the decision to show, and the next state.

        The highest recommendation of the last `window` s is shown if it is above `running`.
        """
        recent = (self.recent if running == self.running else WindowMaximum()).add(now, decision.replicas, window)
        highest = round(recent.value)
        replicas, change = highest if highest > running else decision.replicas, decision.change
        if self.shown is not None and self.shown.replicas == replicas:
            # While the number does not follow, the policy repeats its reason with other figures.
            change = self.shown.change
        shown = replace(decision, replicas=replicas, change=change)
        return shown, DryRun(running, recent, shown)
