"""No autoscaling."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.autoscaling.simulation import View


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed number of replicas."""

    replicas: int
    period: float = 60.0

    def observe(self, view: View) -> int:  # noqa: ARG002 - required by the interface
        """Return the fixed number."""
        return self.replicas
