"""Limit how fast the load changes the number of replicas. Pure.

The limits are the scaling policies of a HorizontalPodAutoscaler. As there, the period of a policy slides, changes for
any reason count, and bounds are not limited. Changes before a restart of the operator do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fastgen_operator.api.autoscaling import Autoscaling, ScaleDown, ScaleUp, ScalingPolicy
from fastgen_operator.autoscale.decision import Decision, Limit, counted


@dataclass(frozen=True, slots=True)
class Scaling:
    """A change of the number of replicas at a monotonic time, negative if some were removed."""

    time: float
    added: int


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The policies of both directions."""

    up: ScaleUp
    down: ScaleDown

    def kept(self, scalings: Sequence[Scaling], now: float) -> tuple[Scaling, ...]:
        """Return the changes within the longest period."""
        longest = max((policy.period_seconds for policy in (*self.up.policies, *self.down.policies)), default=0)
        return tuple(scaling for scaling in scalings if now - scaling.time < longest)

    def allowed(self, current: int, wanted: int, scalings: Sequence[Scaling], now: float) -> int:
        """Return the allowed number between `current` and `wanted` that is closest to `wanted`."""
        if wanted == current:
            return current
        rules, sign = (self.up, 1) if wanted > current else (self.down, -1)
        if rules.select_policy == "Disabled":
            return current
        changes = [_largest_change(policy, sign, current, scalings, now) for policy in rules.policies]
        if not changes:
            return wanted
        most = max(changes) if rules.select_policy == "Max" else min(changes)
        return current + sign * min(abs(wanted - current), max(0, most))


NO_LIMITS: Final = RateLimits(ScaleUp(), ScaleDown())


def rate_limits_of(autoscaling: Autoscaling | None) -> RateLimits:
    """Return the policies of a spec; `NO_LIMITS` without spec.autoscaling."""
    return NO_LIMITS if autoscaling is None else RateLimits(autoscaling.scale_up, autoscaling.scale_down)


def limited(decision: Decision, current: int, allowed: int) -> Decision:
    """Return the decision with the allowed replicas, and with a limit if these are fewer than decided."""
    if allowed == decision.replicas:
        return decision
    limit = decision.limit
    if decision.replicas > current:
        message = f"spec.autoscaling.scaleUp allows {counted(allowed)} now, and the load requires more"
        limit = Limit("RateLimited", message)
    return replace(decision, replicas=allowed, limit=limit)


def _largest_change(policy: ScalingPolicy, sign: int, current: int, scalings: Sequence[Scaling], now: float) -> int:
    """Return how many replicas a policy now allows to add (sign 1) or remove (-1)."""
    since = now - policy.period_seconds
    changed = sum(scaling.added for scaling in scalings if scaling.time > since)
    within = policy.value if policy.type == "Pods" else math.ceil((current - changed) * policy.value / 100)
    return within - sign * changed
