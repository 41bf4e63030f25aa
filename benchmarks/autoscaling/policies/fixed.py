"""No autoscaling."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.autoscaling.simulation import View


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always as many."""

    replicas: int
    period: float = 60.0

    def observe(self, view: View) -> int:  # noqa: ARG002 - a policy sees, this one does not look
        """As many as ever."""
        return self.replicas
