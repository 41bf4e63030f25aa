"""What engines count of requests, and how much of it two revisions had during a step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Counters of one replica since its engine started, or sums of their growth.

    Attributes:
        requests: requests that ended, and rejected ones.
        errors: those that failed through no fault of the client.
        first_tokens: requests with a first token.
        first_token_seconds: sum of the times from the arrival to it.
        gaps: pairs of consecutive tokens of a request.
        gap_seconds: sum of the times between them.
    """

    requests: float = 0.0
    errors: float = 0.0
    first_tokens: float = 0.0
    first_token_seconds: float = 0.0
    gaps: float = 0.0
    gap_seconds: float = 0.0

    def __add__(self, other: Outcomes) -> Outcomes:
        return Outcomes(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def since(self, before: Outcomes) -> Outcomes:
        """Return the growth since an earlier scrape. A counter that decreased means that the engine was restarted."""
        growth = {each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)}
        return self if min(growth.values()) < 0 else Outcomes(**growth)

    @property
    def mean_first_token(self) -> float | None:
        """Mean time to the first token in seconds; None without one."""
        return self.first_token_seconds / self.first_tokens if self.first_tokens > 0 else None

    @property
    def mean_gap(self) -> float | None:
        """Mean time between two tokens in seconds; None without two."""
        return self.gap_seconds / self.gaps if self.gaps > 0 else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was measured of both revisions during one step.

    It is not stored: after a restart of the operator, the evidence about the step is collected again.

    Attributes:
        revision, step_started: what it is about. A revision can be tried again, at the same step.
        canary, stable: growth of the counters of all pods of the new and of the present revision.
        last: the last scrape of each pod.
    """

    revision: str
    step_started: datetime
    canary: Outcomes = Outcomes()
    stable: Outcomes = Outcomes()
    last: Mapping[str, Outcomes] = field(default_factory=dict)

    def add(self, canary: Mapping[str, Outcomes], stable: Mapping[str, Outcomes]) -> Evidence:
        """Return the evidence after another round of scrapes, by pod. The first scrape of a pod is only its start.

        Pods that did not answer, or are gone, add nothing.
        """
        return Evidence(
            self.revision,
            self.step_started,
            self._grown(self.canary, canary),
            self._grown(self.stable, stable),
            {**self.last, **canary, **stable},
        )

    def _grown(self, total: Outcomes, scraped: Mapping[str, Outcomes]) -> Outcomes:
        for pod, outcomes in scraped.items():
            if (before := self.last.get(pod)) is not None:
                total += outcomes.since(before)
        return total
