"""The state of a canary, and what follows from the measurements. Pure.

The state is in `status.canary`, and everything that is done follows from what is stored there: an operator that is
restarted, or another leader, goes on at the same step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from fastgen_operator.api.rollout import Analysis, CanaryRollout
from fastgen_operator.canary.outcomes import Evidence, Outcomes

CanaryOutcome = Literal["Promoted", "RolledBack"]
"""Promoted: the Deployment gets the new revision. RolledBack: it keeps the present one."""

# Means of fewer values are too noisy.
LEAST_REQUESTS: Final = 20
_LEAST_GAPS: Final = 100
# Errors are divided by at least this many requests, so that a single one does not count.
_ERROR_BASE: Final = 100
# The new revision is slower than the present one from these ratios of the means. Its prefix cache starts empty, which
# delays first tokens.
SLOWER_FIRST_TOKEN: Final = 2.0
SLOWER_GAP: Final = 1.5
# How much longer than its minutes a step waits for enough requests.
EVIDENCE_LIMIT: Final = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A new revision on trial, or the last one that was rolled back.

    Attributes:
        revision: hash of its pod template.
        step: index of the step in the spec.
        percent: share of the requests that the gateway sends to it.
        step_started: when the step began.
        measured_since: when the pods of the step were ready; None until then.
        outcome: what was decided; None while it is on trial.
        reason: why, as a reason of the condition Progressing; empty while it is on trial, or if it was promoted.
        message: what it waits for, or why it was rolled back.
    """

    revision: str
    step: int = 0
    percent: int = 0
    step_started: datetime
    measured_since: datetime | None = None
    outcome: CanaryOutcome | None = None
    reason: str = ""
    message: str = ""

    @classmethod
    def from_status(cls, status: dict[str, Any] | None) -> Canary | None:
        """Return what `status.canary` says; None if it is unset or incomplete."""
        if not status or not {"revision", "step", "stepStarted"} <= status.keys():
            return None
        since = status.get("measuredSince")
        return cls(
            revision=status["revision"],
            step=status["step"] - 1,
            percent=status.get("percent", 0),
            step_started=datetime.fromisoformat(status["stepStarted"]),
            measured_since=None if since is None else datetime.fromisoformat(since),
            outcome=status.get("outcome"),
            reason=status.get("reason", ""),
            message=status.get("message", ""),
        )

    def to_status(self) -> dict[str, Any]:
        """Return `status.canary`."""
        shown = {
            "revision": self.revision,
            "step": self.step + 1,
            "percent": self.percent,
            "stepStarted": _written(self.step_started),
            "measuredSince": None if self.measured_since is None else _written(self.measured_since),
            "outcome": self.outcome,
            "reason": self.reason or None,
            "message": self.message,
        }
        return {name: value for name, value in shown.items() if value is not None}

    @property
    def has_pods(self) -> bool:
        """Whether it has pods of its own: until it is rolled back, or the Deployment has its revision."""
        return self.outcome != "RolledBack"

    @property
    def serves_since(self) -> datetime | None:
        """Since when its pods have to serve; None before the first step's pods were ready."""
        return self.measured_since or (self.step_started if self.percent else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is known about the two revisions.

    Attributes:
        rollout: the spec's; None without `spec.rollout.canary`.
        wanted: the revision that the spec asks for.
        stable: the revision of the Deployment.
        is_rolled_out: whether all pods of the Deployment have its revision.
        can_start: whether requests can be compared: the present revision serves the same name, and is to go on.
        replicas: number of pods of the Deployment.
        ready: number of ready pods of the canary.
        unready: why the first of the others is not ready; empty if all are.
        crash: how the engine of one of them, which served, ended since `serves_since`; empty if none did.
        evidence: what was measured; None while nothing was.
        deadline: time in which the pods of a step must become ready.
    """

    rollout: CanaryRollout | None
    wanted: str
    stable: str
    is_rolled_out: bool
    can_start: bool
    replicas: int
    ready: int = 0
    unready: str = ""
    crash: str = ""
    evidence: Evidence | None = None
    deadline: timedelta


@dataclass(frozen=True, slots=True)
class Rollback:
    """Why a new revision is rolled back: a reason of the condition Progressing, and its message."""

    reason: str
    message: str


def num_pods(replicas: int, percent: int) -> int:
    """Return how many pods a share of the requests needs beside those of the Deployment: at least one."""
    return max(1, math.ceil(replicas * percent / 100))


def next_canary(before: Canary | None, trial: Trial, now: datetime) -> Canary | None:
    """Return the state after `before`; None if there is no new revision to try, or if it replaces the pods directly.

    Another new revision starts again at the first step. The present one ends the trial.
    """
    if trial.rollout is None:
        return None
    if trial.wanted == trial.stable:
        promotes = before is not None and (before.revision, before.outcome) == (trial.wanted, "Promoted")
        return before if promotes and not trial.is_rolled_out else None
    if before is None or before.revision != trial.wanted:
        if not trial.can_start:
            return None
        started = Canary(revision=trial.wanted, step_started=now)
        return replace(started, message=_waiting(started, trial.rollout))
    if before.outcome is not None:
        return before
    if trial.replicas == 0:
        return None
    # The spec may have fewer steps than before.
    current = replace(before, step=min(before.step, len(trial.rollout.steps) - 1))
    return _judged(current, trial.rollout, trial, now)


def _judged(current: Canary, rollout: CanaryRollout, trial: Trial, now: datetime) -> Canary:
    """Return the next state of a canary on trial."""
    if trial.crash:
        return _rolled_back(current, Rollback("CanaryCrashed", trial.crash))
    step = rollout.steps[current.step]
    if current.measured_since is None:
        if trial.ready >= num_pods(trial.replicas, step.percent):
            serving = replace(current, percent=step.percent, measured_since=now)
            return replace(serving, message=_measuring(serving, rollout))
        if now - current.step_started > trial.deadline:
            words = f"not ready within {trial.deadline.total_seconds():.0f} s: {trial.unready or 'no pod exists'}"
            return _rolled_back(current, Rollback("CanaryNotReady", words))
        return replace(current, message=_waiting(current, rollout))
    evidence, about = trial.evidence, (current.revision, current.step_started)
    if evidence is None or (evidence.revision, evidence.step_started) != about:
        evidence = Evidence(*about)
    if (found := _fault(evidence.canary, evidence.stable, rollout.analysis)) is not None:
        return _rolled_back(current, found)
    if (passed := now - current.measured_since) < (least := timedelta(minutes=step.minutes)):
        return replace(current, percent=step.percent, message=_measuring(current, rollout))
    if evidence.canary.first_tokens < LEAST_REQUESTS:
        if passed > least + EVIDENCE_LIMIT:
            words = (
                f"fewer than {LEAST_REQUESTS} requests had a first token at {step.percent} % of the requests within "
                f"{_minutes(least + EVIDENCE_LIMIT)}: send requests to the gateway, or raise percent"
            )
            return _rolled_back(current, Rollback("CanaryUntested", words))
        words = f"{_place(current, rollout)}: waits for {LEAST_REQUESTS} requests with a first token"
        return replace(current, percent=step.percent, message=words)
    if current.step + 1 == len(rollout.steps):
        return replace(current, outcome="Promoted", message="passed all steps")
    following = replace(current, step=current.step + 1, step_started=now, measured_since=None)
    return replace(following, message=_waiting(following, rollout))


def _fault(canary: Outcomes, stable: Outcomes, analysis: Analysis) -> Rollback | None:
    """Return why the new revision is not good enough; None if nothing says so."""
    if canary.errors * 100 > analysis.max_error_percent * max(canary.requests, _ERROR_BASE):
        found = f"{canary.errors:.0f} of {canary.requests:.0f} requests failed"
        return Rollback("CanaryFailsRequests", f"{found}, more than {analysis.max_error_percent} %")
    slow = _too_slow(
        "first token",
        (canary.mean_first_token, canary.first_tokens),
        (stable.mean_first_token, stable.first_tokens),
        LEAST_REQUESTS,
        analysis.max_first_token_milliseconds,
        SLOWER_FIRST_TOKEN if analysis.compare_with_stable else math.inf,
    )
    slow = slow or _too_slow(
        "time between tokens",
        (canary.mean_gap, canary.gaps),
        (stable.mean_gap, stable.gaps),
        _LEAST_GAPS,
        analysis.max_inter_token_milliseconds,
        SLOWER_GAP if analysis.compare_with_stable else math.inf,
    )
    return Rollback("CanaryTooSlow", slow) if slow else None


def _too_slow(
    what: str,
    canary: tuple[float | None, float],
    stable: tuple[float | None, float],
    least: int,
    limit: int | None,
    ratio: float,
) -> str:
    """Say that a mean time of the new revision is too long; empty if it is not, or of too few values.

    Args:
        what: the time.
        canary, stable: mean in seconds, and number of values, of each revision.
        least: how many values a mean must have.
        limit: milliseconds; None for no limit.
        ratio: to the mean of the present revision.
    """
    mean, other = canary[0], stable[0]
    if mean is None or canary[1] < least:
        return ""
    words = f"the mean {what} is {1000 * mean:.0f} ms"
    if limit is not None and 1000 * mean > limit:
        return f"{words}, more than {limit} ms"
    if other is not None and stable[1] >= least and mean > ratio * other:
        return f"{words}, and {1000 * other:.0f} ms with the present revision"
    return ""


def _rolled_back(current: Canary, why: Rollback) -> Canary:
    return replace(current, percent=0, outcome="RolledBack", reason=why.reason, message=why.message)


def _place(current: Canary, rollout: CanaryRollout) -> str:
    """Say which step it is."""
    percent = rollout.steps[current.step].percent
    return f"step {current.step + 1} of {len(rollout.steps)}, {percent} % of the requests"


def _waiting(current: Canary, rollout: CanaryRollout) -> str:
    return f"{_place(current, rollout)}: waits for its pods"


def _measuring(current: Canary, rollout: CanaryRollout) -> str:
    return f"{_place(current, rollout)} for {_minutes(timedelta(minutes=rollout.steps[current.step].minutes))}"


def _minutes(time: timedelta) -> str:
    return f"{time.total_seconds() / 60:.0f} min"


def _written(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
